"""Garbage is collected beside the next rollout: on a slow file system it takes longer than a commit."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from argusrl.journal.retention import collect_garbage
from argusrl.training.evaluation_file import BestAdapter
from argusrl.training.run import Run


class Collector:
    """One collection at a time, in a thread."""

    def __init__(self) -> None:
        self._work: asyncio.Future[Any] | None = None

    async def go_on(self, run: Run, best: BestAdapter) -> None:
        """Begin to collect what the last commit leaves behind. Raises what the collection before raised."""
        await self.wait()
        self._work = asyncio.ensure_future(asyncio.to_thread(_collection(run, best)))

    async def wait(self) -> None:
        """Until the collection is over. Raises StorageError."""
        if self._work is not None:
            work, self._work = self._work, None
            await work

    async def stop(self) -> None:
        """Until the collection is over, however it ends: nothing is deleted while a fault is healed."""
        if self._work is not None:
            await asyncio.wait([self._work])
            self._work.exception()


def _collection(run: Run, best: BestAdapter) -> Callable[[], Any]:
    """What to do, as of now: the run goes on meanwhile."""
    section, step = run.config.checkpoint, run.state.step
    return partial(
        collect_garbage,
        run.folder,
        copy.copy(run.chain),  # it walks on by itself
        keep_checkpoints=section.keep,
        keep_adapters=max(section.keep_adapters, 1 + run.config.rollout.staleness),  # a restart serves as many
        protected_versions={0, best.step},
        keep_trajectories=section.keep_trajectories,
        # What interrupted tries of a step left is the evidence that a rehearsal is judged by.
        from_step=max(0, step - 1) if run.rehearsal is None else step + 1,
    )
