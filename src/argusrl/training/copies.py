"""What run.copy_to asks for: the best adapter whenever there is a new one, and the last one, beside the run."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from argusrl.storage.s3 import BackgroundCopies, Place

if TYPE_CHECKING:
    from argusrl.journal.commits import Commit
    from argusrl.training.evaluation_file import BestAdapter
    from argusrl.training.run import Run


def copies_for(run: Run, loop: asyncio.AbstractEventLoop) -> BackgroundCopies | None:
    """The thread that copies for a run, which says in its loop what became of it; None where nobody asks for copies."""
    if run.config.run.copy_to is None:
        return None

    def report(kind: str, text: str) -> None:
        with suppress(RuntimeError):  # the loop has ended, and the driver with it
            loop.call_soon_threadsafe(partial(run.say, kind, text, warning=kind != "copied"))

    return BackgroundCopies(Place.of(run.config.run.copy_to) / run.folder.name, report)


def copy_best(run: Run, best: BestAdapter) -> None:
    """Have the best adapter so far copied, and said in best.json which one it is. What is there is not sent again."""
    if run.copies is None or best.accuracy < 0:
        return
    commit = run.chain.read(best.step)
    pointer = {
        "step": best.step,
        "accuracy": best.accuracy,
        "sha256": commit.adapter.sha256,
        "path": copy_name(commit),
    }
    run.copies.copy(run.folder.absolute(commit.adapter.path), copy_name(commit), pointer)


def copy_last(run: Run) -> None:
    """Have the adapter of the last commit copied."""
    head = run.chain.head()
    if run.copies is not None and head is not None:
        run.copies.copy(run.folder.absolute(head.adapter.path), copy_name(head))


async def copies_sent(run: Run) -> None:
    """At the end of a run: wait for what is under way, which has a deadline."""
    if run.copies is not None:
        if run.copies.busy:
            run.display.message(f"Waiting for copies to {run.config.run.copy_to}")
        await asyncio.to_thread(run.copies.close)


def copy_name(commit: Commit) -> str:
    """Version and digest: no two different adapters of a run have the same one."""
    version = Path(commit.adapter.path).name.partition(".")[0]
    return f"adapters/{version}-{commit.adapter.sha256[:12]}"
