"""Ranks whose node was lost, while the others go on without them: each is made again when its bundle has a node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from argusrl.errors import ArgusError, DeadlineError, WorkerError
from argusrl.training.bring_up import Hiring
from argusrl.training.calls import call
from argusrl.training.fleet import Member, kill
from argusrl.training.nodes import Nodes

_BEAT_SECONDS = 1.0


@dataclass(slots=True)
class LeftBehind:
    """`ready` are those that have started and wait for the next boundary between steps."""

    hiring: Hiring
    nodes: Nodes
    on_fault: Callable[[int, ArgusError], Awaitable[bool]]  # whether to try again
    start_seconds: float
    ready: dict[int, Member] = field(default_factory=dict)  # by place
    _tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._tasks)

    def leave(self, member: Member) -> None:
        """This rank is not waited for. Its process, if it has one, ends."""
        kill(member.actor)
        self._tasks[member.place] = asyncio.create_task(self._come_back(member.place))

    def take(self) -> list[Member]:
        """Those that are ready; they belong to the caller."""
        members = list(self.ready.values())
        self.ready.clear()
        for member in members:
            self._tasks.pop(member.place).cancel()
        return members

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _come_back(self, place: int) -> None:
        bundle = self.hiring.placement.layout.bundle("rank", place)
        while True:
            homes = await self.nodes.homes()
            if bundle not in homes:
                await asyncio.sleep(_BEAT_SECONDS)
                continue
            member = self.hiring.rank(place)
            self.nodes.where["rank", place] = homes[bundle]
            try:
                while True:
                    reference = member.actor.attach.remote(self.hiring.position.epoch, self.hiring.identity)
                    await call(reference, self.start_seconds, "start", f"rank {place}")
                    self.ready[place] = member
                    await asyncio.sleep(_BEAT_SECONDS)
            except (WorkerError, DeadlineError) as fault:
                self.ready.pop(place, None)
                kill(member.actor)
                if not await self.on_fault(place, fault):
                    return
