"""Looks at every worker every second: who died, who hangs. Progress counts, not whether a health call answers.

An engine hangs when it has requests and neither steps nor tokens for `recovery.hang_seconds`; any worker hangs when
it does not answer for so long. A slow tool, a long prompt and a slow rank make progress, and are left alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from argusrl.config.sections import RecoverySection
from argusrl.errors import ArgusError, DeadlineError, FencedError, WorkerError
from argusrl.rollout.engine import EngineProgress
from argusrl.training.calls import call
from argusrl.training.fleet import EngineFleet, EpisodeFleet, Fleet, Position, RankFleet, Workers, kill

PERIOD_SECONDS = 1.0
_BEATS = 10  # per lease


async def keep_alive(actors: Callable[[], Iterable[Any]], position: Position, lease_seconds: float) -> None:
    """Renew the leases of all workers: some are not asked for progress, but wait for long until they are needed."""
    while True:
        for actor in actors():
            actor.beat.remote(position.epoch)
        await asyncio.sleep(lease_seconds / _BEATS)


class Watch:
    """One task per worker. A lost engine is told to its fleet; a lost rank or episode worker is killed and re-made,

    so that calls that wait for it fail, and the next one is already starting when its group is formed anew.
    """

    def __init__(self, workers: Workers, recovery: RecoverySection, on_fenced: Callable[[ArgusError], None]) -> None:
        self.workers, self.hang_seconds, self.on_fenced = workers, recovery.hang_seconds, on_fenced
        self.lease_seconds = recovery.orphan_seconds
        self.tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to watch. Workers that have not been attached yet are left alone."""
        engines, ranks, episodes = self.workers.engines, self.workers.ranks, self.workers.episodes
        watches = [self._engine(engines, number) for number in range(len(engines.members))]
        for fleet in (ranks, episodes):
            watches += [self._other(fleet, number) for number in range(len(fleet.members))]
        watches.append(keep_alive(self.workers.actors, self.workers.position, self.lease_seconds))
        self.tasks = [asyncio.create_task(watch) for watch in watches]

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _engine(self, engines: EngineFleet, number: int) -> None:
        before: Any = None
        since = time.monotonic()
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            if number not in engines.serving:
                before = None
                continue
            actor = engines.members[number].actor
            try:
                progress = await self._ask(actor.progress, engines, number)
            except (WorkerError, DeadlineError) as fault:
                self._engine_lost(engines, number, actor, fault)
                continue
            if progress is None:
                continue
            now = (actor, progress.steps, progress.generated_tokens)
            if progress.running_requests == 0 or now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > self.hang_seconds:
                self._engine_lost(engines, number, actor, self._stuck(engines.name(number), progress))

    def _engine_lost(self, engines: EngineFleet, number: int, actor: Any, fault: ArgusError) -> None:
        if actor is engines.members[number].actor:
            kill(actor)
            engines.lost(number, fault)

    def _stuck(self, name: str, progress: EngineProgress) -> DeadlineError:
        return DeadlineError(
            f"{name} hangs: {progress.running_requests} requests and no progress for {self.hang_seconds:g} s"
        )

    async def _other(self, fleet: RankFleet | EpisodeFleet, number: int) -> None:
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            if number >= len(fleet.members) or fleet.members[number].fresh:
                continue
            member = fleet.members[number]
            try:
                await self._ask(member.actor.beat, fleet, number)
            except (WorkerError, DeadlineError) as fault:
                if number < len(fleet.members) and fleet.members[number] is member:
                    fleet.losses[fleet.name(number)] = fault
                    fleet.replace(number)

    async def _ask(self, method: Any, fleet: Fleet, number: int) -> Any:
        epoch = self.workers.position.epoch
        try:
            return await call(method.remote(epoch), self.hang_seconds, "heartbeat", fleet.name(number))
        except FencedError as fault:
            if epoch == self.workers.position.epoch:  # or else this driver's own new epoch overtook the question
                self.on_fenced(fault)
            return None
