"""Engines that are lost are replaced in the background, while the others serve on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from argusrl.errors import (
    ArgusError,
    CorruptionError,
    DeadlineError,
    FencedError,
    StorageError,
    WorkerError,
    WorkerLost,
)
from argusrl.recovery.decide import Decision
from argusrl.recovery.storage_wait import storage_problem
from argusrl.training.bring_up import Hiring
from argusrl.training.fleet import kill
from argusrl.training.nodes import Nodes

if TYPE_CHECKING:
    from argusrl.training.run import Run


@dataclass
class Replacing:
    """A task for each engine that is on its way back. `judge` notes a loss and asks the rule about it."""

    run: Run
    hiring: Hiring
    nodes: Nodes
    judge: Callable[[int, ArgusError], Awaitable[Decision]]
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    lost_again: dict[int, ArgusError] = field(default_factory=dict)  # while their return was made known

    def __contains__(self, number: int) -> bool:
        return number in self.tasks

    def lost(self, number: int, fault: ArgusError) -> None:
        """Judge the loss of an engine, and replace it where that is the answer."""
        if number in self.tasks:
            self.lost_again[number] = fault
        else:
            self._begin(number, fault)

    def replace(self, number: int) -> None:
        """Replace an engine whose loss is judged already, unless it is on its way back."""
        if number not in self.tasks:
            self.run.workers.engines.serving.discard(number)
            self._begin(number, None)

    def keep_standby(self) -> None:
        """Begin to start the standby that takes the place of the next engine that is lost.

        Ray gives a GPU to a process when it starts, and a standby must not hold one: so there are none on GPUs.
        """
        wanted = self.run.config.recovery.standby_engines
        if len(self.hiring.standbys) < wanted and self.hiring.placement.layout.device == "cpu":
            self.hiring.standby()

    async def stop(self) -> None:
        """End what is under way."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, number: int, fault: ArgusError | None) -> None:
        self.tasks[number] = asyncio.create_task(self._heal(number, fault))

    async def _heal(self, number: int, fault: ArgusError | None) -> None:
        """Until the engine serves, or the rule says that this driver cannot help it."""
        run, name = self.run, self.run.workers.engines.name(number)
        try:
            while True:
                if fault is not None:
                    decision = await self.judge(number, fault)
                    if decision.action not in ("replace_engine", "recover", "wait"):
                        run.give_up(WorkerError(decision.reason))
                        return
                try:
                    await self._replace(number)
                    fault = self.lost_again.pop(number, None)
                    if fault is None:
                        return
                except StorageError as away:  # no fault of the engine
                    logging.warning("%s: %s", name, away.message)
                    if isinstance(away, CorruptionError) and not await self._storage_away():
                        run.give_up(away)  # the next engine would read the same bytes
                        return
                    await run.wait_for_storage()
                    fault = self.lost_again.pop(number, None)
                except ArgusError as again:
                    fault = self.lost_again.pop(number, again)
        except Exception as error:
            logging.exception("replacing %s failed", name)
            run.give_up(WorkerError(f"replacing {name} failed: {type(error).__name__}: {error}"))
        finally:  # not in a callback of the task: a loss between its end and the callback would be nobody's
            del self.tasks[number]

    async def _storage_away(self) -> bool:
        """What is missing with its whole folder is not damaged."""
        return await asyncio.to_thread(storage_problem, self.run.folder, self.run.chain.head_sha256) is not None

    async def _replace(self, number: int) -> None:
        run, engines = self.run, self.run.workers.engines
        started = time.monotonic()
        continued = await self._tell_engines()
        bundle = self.hiring.placement.layout.bundle("engine", number)
        engines.serving.discard(number)
        kill(engines.members[number].actor)
        while bundle not in (homes := await self.nodes.have([bundle])):  # others serve meanwhile
            pass
        # Engines measure free memory while they start, so on shared GPUs ranks must be out of it.
        async with run.colocation.rollout() if run.workers_share_gpus else nullcontext():
            engines.replace(number)
            self.nodes.where["engine", number] = homes[bundle]
            await engines.attach(number, run.config.cluster.start_timeout_seconds)
            # Before there is a canary somebody waits for an engine; later it comes back with what the others know.
            ungated = run.workers_share_gpus or run.state.canary is None
            async with nullcontext() if ungated else run.colocation.rollout():
                continued += await self._admit(number)
        seconds = round(time.monotonic() - started, 3)
        run.say(
            "healed",
            f"{engines.name(number)} is back after {seconds:.1f} s",
            member=engines.name(number),
            seconds=seconds,
            continued_tokens=continued,
            engines=len(engines.members),
        )
        self.keep_standby()

    async def _admit(self, number: int) -> int:
        """The engine serves once it has proven the adapters that the others serve; tokens that are gone on from."""
        run, engines = self.run, self.run.workers.engines
        for serving in run.serving:
            assert run.state.canary is not None
            proof = await engines.bring_up_to(number, run.state.canary, serving.adapter)
            run.verify(serving.adapter, [proof], serving.canary)
        engines.admit(number)
        return await self._tell_engines()

    async def _tell_engines(self) -> int:
        """Say who serves; tokens that were gone on from. Who is lost or in a newer epoch hears of it there."""
        try:
            return await self.run.workers.episodes.set_engines(self.run.workers.engines.handles())
        except (WorkerLost, DeadlineError, FencedError) as fault:
            logging.warning("engines could not be told: %s", fault.message)
            return 0
