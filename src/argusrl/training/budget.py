"""The byte budget of a run (run.max_bytes): before a step that would go beyond it, what may be pruned is pruned.

The folder is measured when the count of what was written since the last measure says that it may be too large; a walk
through a shared file system before each step would cost more than it tells.
"""

from __future__ import annotations

import asyncio
import copy

from argusrl.errors import StorageUnusable
from argusrl.journal.retention import collect_garbage
from argusrl.journal.usage import Size, total, usage
from argusrl.storage.free_space import byte_text
from argusrl.training.collecting import Collector
from argusrl.training.evaluation_file import BestAdapter
from argusrl.training.run import Run


class ByteBudget:
    """Keeps one run within its budget; without one it does nothing."""

    def __init__(self, run: Run, best: BestAdapter, collector: Collector) -> None:
        self._run, self._best, self._collector = run, best, collector
        self._measured: int | None = None
        self._counted = 0  # written_bytes of the run when it was measured

    async def make_room(self) -> None:
        """Before a step. Raises StorageUnusable where it does not fit even after pruning: waiting is of no use."""
        limit = self._run.config.run.max_bytes
        if limit is None or self._fits(limit):
            return
        await self._collector.wait()
        sizes = await self._measure()
        if self._fits(limit):
            return
        sizes = await self._pruned(sizes, limit)
        if self._fits(limit):
            return
        await self._run.staged()
        await self._run.workers.ranks.finish_checkpoint()  # once it is durable, the one before may go
        sizes = await self._pruned(sizes, limit)
        if not self._fits(limit):
            fault = _beyond(self._run, sizes, limit)
            self._run.give_up(fault)
            raise fault

    async def _pruned(self, sizes: dict[str, Size], limit: int) -> dict[str, Size]:
        """Prune; what is left."""
        await asyncio.to_thread(self._prune)
        left = await self._measure()
        before, after = total(sizes).bytes, total(left).bytes
        if after < before:
            text = f"run.max_bytes = {byte_text(limit)} is near: {byte_text(before - after)} were pruned"
            self._run.say("pruned", text, bytes_before=before, bytes_after=after)
        return left

    def _fits(self, limit: int) -> bool:
        if self._measured is None:
            return False
        return self._measured + self._run.written_bytes - self._counted + self._run.step_bytes <= limit

    async def _measure(self) -> dict[str, Size]:
        self._counted = self._run.written_bytes
        sizes = await asyncio.to_thread(usage, self._run.folder)
        self._measured = total(sizes).bytes
        return sizes

    def _prune(self) -> None:
        """As far as a restart, the best adapter and checkpoint.keep_trajectories allow."""
        run = self._run
        collect_garbage(
            run.folder,
            copy.copy(run.chain),
            keep_checkpoints=1,
            keep_adapters=1 + run.config.rollout.staleness,
            protected_versions={0, self._best.step},
            keep_trajectories=run.config.checkpoint.keep_trajectories,
            from_step=max(0, run.state.step - 1) if run.rehearsal is None else run.state.step + 1,
        )


def _beyond(run: Run, sizes: dict[str, Size], limit: int) -> StorageUnusable:
    largest = sorted(sizes.items(), key=lambda item: -item[1].bytes)[:3]
    parts = ", ".join(f"{kind} {byte_text(size.bytes)}" for kind, size in largest)
    journal = sizes["trajectories"].bytes + sizes["images"].bytes
    drops = run.config.checkpoint.keep_trajectories and journal > total(sizes).bytes / 10
    drop = " (or checkpoint.keep_trajectories: false)" if drops else ""
    return StorageUnusable(
        f"{run.folder.path} holds {byte_text(total(sizes).bytes)} ({parts}), the next step writes about "
        f"{byte_text(run.step_bytes)}, and run.max_bytes is {byte_text(limit)}: nothing more may be pruned",
        f"set a larger run.max_bytes{drop} and run the same command again: it resumes",
    )
