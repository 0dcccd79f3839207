"""A checkpoint is asked for at once and waited for later: it is that of the step it was asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argusrl.errors import StorageError
from argusrl.storage.layout import RunFolder
from argusrl.training.fleet import Member, Position, RankFleet
from argusrl.training.run import Run


def ranks(answer: Any) -> tuple[RankFleet, list[tuple[int, int, str, str]]]:
    """Two ranks, and the calls they got."""
    calls: list[tuple[int, int, str, str]] = []

    def remote(epoch: int, step: int, commit_sha256: str, state_digest: str) -> Any:
        calls.append((epoch, step, commit_sha256, state_digest))
        return answer()

    actor = SimpleNamespace(save_checkpoint=SimpleNamespace(remote=remote))
    members = [Member(place, actor) for place in range(2)]
    return RankFleet(members, lambda _: members[0], "id", Position(3, 7), 5.0), calls


def run_of(fleet: RankFleet, every_steps: int = 1) -> tuple[Any, list[str]]:
    run: Any = Run.__new__(Run)
    passed: list[str] = []
    run.staging = None
    run.folder, run.epoch = RunFolder(Path("run")), SimpleNamespace(number=3)
    run.config = SimpleNamespace(
        algorithm=SimpleNamespace(num_steps=9), checkpoint=SimpleNamespace(every_steps=every_steps)
    )
    run.workers = SimpleNamespace(ranks=fleet)
    run.chain = SimpleNamespace(head_sha256="commit 7")
    run.on_phase, run.display = (lambda name: None), SimpleNamespace(phase=lambda name: None)
    run.rehearsal = SimpleNamespace(reached=lambda point, step: passed.append(point))
    run.state = SimpleNamespace(step=6)
    return run, passed


async def fine() -> None:
    return None


async def full() -> None:
    raise StorageError("no space left for the checkpoint of step 6")


def test_ranks_are_asked_before_anything_else_happens() -> None:
    async def work() -> None:
        fleet, calls = ranks(fine)
        run, passed = run_of(fleet)
        run.checkpoint(SimpleNamespace(step=7, state_digest="digest"))
        fleet.position.step = 8  # the next step begins before the loop has done anything
        assert calls == [(3, 7, "commit 7", "digest")] * 2
        assert passed == ["checkpointing"]
        assert run.begun_checkpoint == run.folder.checkpoint(7, 3)
        await run.staged()
        await run.staged()  # nothing is left to wait for

    asyncio.run(work())


def test_what_went_wrong_is_raised_once_where_it_is_waited_for() -> None:
    async def work() -> None:
        run, _ = run_of(ranks(full)[0])
        run.checkpoint(SimpleNamespace(step=7, state_digest="digest"))
        with pytest.raises(StorageError, match="step 6"):
            await run.staged()
        await run.staged()

    asyncio.run(work())


@pytest.mark.parametrize(("step", "due"), [(6, True), (7, False), (9, True)])
def test_checkpoints_are_due_every_few_steps_and_after_the_last(step: int, due: bool) -> None:
    async def work() -> None:
        fleet, calls = ranks(fine)
        run, _ = run_of(fleet, every_steps=3)
        run.checkpoint(SimpleNamespace(step=step, state_digest="digest"))
        assert bool(calls) is due
        await run.staged()

    asyncio.run(work())
