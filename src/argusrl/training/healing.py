"""What the driver does about faults while the run goes on. The rule is in recovery/decide.py.

An engine is replaced in the background: the others serve on. Everything else goes back to one boundary: the driver
claims a new epoch (so that calls and files of the time before are refused), re-makes what is broken, restores the
state of the last commit where it was lost, and adopts what the journal holds of the open step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from argusrl.errors import (
    ArgusError,
    DeadlineError,
    StorageError,
    WorkerError,
    WorkerLost,
)
from argusrl.journal.commits import Adopted
from argusrl.recovery.decide import Decision, decide
from argusrl.recovery.faults import Fault, FaultHow, FaultKind
from argusrl.recovery.storage_wait import await_storage
from argusrl.training.bring_up import Hiring
from argusrl.training.fleet import EngineFleet, Fleet, Member, RankFleet
from argusrl.training.placement import node_lost
from argusrl.training.rank_worker import RankStatus

if TYPE_CHECKING:
    from argusrl.training.run import Run

HEALABLE = (WorkerError, DeadlineError, StorageError, Adopted)
"""What `Healing.recover` can do something about; CorruptionError, a StorageError, is not among it."""


@dataclass
class Healing:
    """Faults of this driver so far, and the engines that are being replaced."""

    run: Run
    hiring: Hiring
    history: list[Fault] = field(default_factory=list)
    replacing: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    absent: list[Member] = field(default_factory=list)  # ranks of a lost node, starting when it is replaced

    def judge(self, kind: FaultKind, member: str, how: FaultHow, message: str) -> Decision:
        """Note a fault and what the rule says about it."""
        fault = Fault(kind=kind, member=member, how=how, step=self.run.state.step, time=time.time(), message=message)
        self.history.append(fault)
        decision = decide(self.history, self.run.config.recovery)
        self.run.say(
            "fault",
            message,
            warning=True,
            fault=kind,
            member=member,
            how=how,
            step=self.run.workers.position.step,
            decision=decision.action,
            reason=decision.reason,
        )
        return decision

    # ---- engines

    def engine_lost(self, number: int, fault: ArgusError) -> None:
        """Replace an engine in the background."""
        engines = self.run.workers.engines
        decision = self.judge("engine", engines.name(number), how_of(fault), fault.message)
        if decision.action != "replace_engine":
            self.run.give_up(WorkerError(decision.reason))
        elif number not in self.replacing:
            task = asyncio.create_task(self._replace_engine(number))
            self.replacing[number] = task
            task.add_done_callback(lambda _: self.replacing.pop(number, None))

    async def _replace_engine(self, number: int) -> None:
        run, engines = self.run, self.run.workers.engines
        started = time.monotonic()
        try:
            await self._tell_engines()
            # Engines measure free memory while they start, so on shared GPUs ranks must be out of it.
            async with run.colocation.rollout() if run.workers_share_gpus else nullcontext():
                engines.replace(number)
                await engines.attach(number, self._start_seconds(engines))
                async with nullcontext() if run.workers_share_gpus else run.colocation.rollout():
                    await self._admit(number)
        except ArgusError as fault:
            self.replacing.pop(number, None)
            self.engine_lost(number, fault)
            return
        except Exception as error:
            logging.exception("replacing %s failed", engines.name(number))
            run.give_up(WorkerError(f"replacing {engines.name(number)} failed: {type(error).__name__}: {error}"))
            return
        seconds = round(time.monotonic() - started, 3)
        run.say(
            "healed",
            f"{engines.name(number)} is back after {seconds:.1f} s",
            member=engines.name(number),
            seconds=seconds,
        )
        self.keep_standby()

    async def _admit(self, number: int) -> None:
        """The engine serves once it has proven the adapter that the others serve."""
        run, engines = self.run, self.run.workers.engines
        serving, canary = run.serving, run.state.canary
        if serving is not None and canary is not None:
            proof = await engines.bring_up_to(number, canary, serving.adapter)
            run.verify(serving.adapter, [proof], serving.canary)
        engines.admit(number)
        await self._tell_engines()

    async def _tell_engines(self) -> None:
        """Say who serves. An episode worker that is lost meanwhile hears of it when it is re-made."""
        try:
            await self.run.workers.episodes.set_engines(self.run.workers.engines.handles())
        except (WorkerLost, DeadlineError) as fault:
            logging.warning("engines could not be told: %s", fault.message)

    def keep_standby(self) -> None:
        """Begin to start the standby that takes the place of the next engine that is lost."""
        if len(self.hiring.standbys) < self.run.config.recovery.standby_engines:
            self.hiring.standby(0)

    # ---- everything else

    async def prepare(self, error: BaseException) -> None:
        """Judge what ended a step; wait where that is the answer. Raises what the rule does not heal here."""
        run = self.run
        if isinstance(error, Adopted):
            run.say("adopted", f"epoch {error.commit.epoch} had committed step {error.commit.step} first", warning=True)
            return
        kind, member, how = self._classify(error)
        decision = self.judge(kind, member, how, getattr(error, "message", str(error)))
        if decision.action in ("restart_driver", "stop"):
            raise error
        if kind == "storage":
            await await_storage(
                run.folder,
                run.chain.head_sha256,
                deadline_seconds=run.config.recovery.storage_wait_seconds,
                say=lambda text: run.say("waiting", text, warning=True),
            )

    def recovered(self, fault: BaseException, seconds: float) -> None:
        """The run goes on."""
        what = getattr(fault, "message", str(fault))
        self.run.say(
            "recovered",
            f"going on after {seconds:.1f} s: {what}",
            seconds=round(seconds, 3),
            epoch=self.run.epoch.number,
        )

    def _classify(self, error: BaseException) -> tuple[FaultKind, str, FaultHow]:
        if isinstance(error, StorageError):
            return "storage", str(self.run.folder.path), "raised"
        member = self._lost_member() or getattr(error, "member", "")
        message = getattr(error, "message", "")
        for noun, kind in (("rank", "rank"), ("episode worker", "episode_worker"), ("engine", "engine")):
            if member.startswith(noun) or (not member and message.startswith(noun)):
                return kind, member or message.partition(":")[0], how_of(error)  # type: ignore[return-value]
        return "rank", member or type(error).__name__, how_of(error)

    def _lost_member(self) -> str:
        """Who the watch found lost: its death explains what the others raise."""
        for fleet in (self.run.workers.ranks, self.run.workers.episodes):
            if fleet.losses:
                return next(iter(fleet.losses))
        return ""

    # ---- bringing up, first or again

    async def engines_up(self) -> None:
        """All engines serve, or are being replaced. At the first start what is wrong is raised."""
        engines = self.run.workers.engines
        places = [n for n in range(len(engines.members)) if n not in self.replacing]
        await asyncio.gather(*(self._engine_up(engines, number) for number in places))
        engines.on_lost = self.engine_lost
        await engines.someone(self.run.config.cluster.start_timeout_seconds)

    async def _engine_up(self, engines: EngineFleet, number: int) -> None:
        if await self._attached(engines, number):
            if number not in engines.serving:
                engines.admit(number)
        elif number in engines.serving:
            engines.lost(number, WorkerLost(f"{engines.name(number)} does not answer", member=engines.name(number)))
        else:
            engines.replace(number)
            await engines.attach(number, self._start_seconds(engines))
            engines.admit(number)

    async def episodes_up(self) -> None:
        """All episode workers answer and know the engines."""
        episodes = self.run.workers.episodes

        async def up(number: int) -> None:
            if not await self._attached(episodes, number):
                episodes.replace(number)
                await episodes.attach(number, self._start_seconds(episodes))

        await asyncio.gather(*(up(number) for number in range(len(episodes.members))))
        episodes.losses.clear()
        await episodes.set_engines(self.run.workers.engines.handles())

    async def ranks_up(self) -> bool:
        """All ranks are in one group. True if they are new in it: their state has to be loaded."""
        ranks = self.run.workers.ranks
        if self.absent:
            await self._return_absent(ranks)
        answers = await asyncio.gather(*(self._attached(ranks, number) for number in range(len(ranks.members))))
        groups = {answer.group if isinstance(answer, RankStatus) else "" for answer in answers}
        if len(groups) == 1 and groups != {""} and not ranks.losses and self._complete():
            return False
        for number, answer in enumerate(answers):
            if answer is None:
                ranks.replace(number)
        await self._await_ranks(ranks)
        ranks.losses.clear()
        await ranks.connect(f"ranks-{self.run.epoch.number}", self._start_seconds(ranks))
        self.run.conditions["ranks"] = len(ranks.members)
        return True

    def _complete(self) -> bool:
        return self.run.conditions["ranks"] == len(self.run.workers.ranks.members)

    async def _await_ranks(self, ranks: RankFleet) -> None:
        """Wait for new ranks. Those of a lost node may stay behind where the recipe allows fewer ranks."""
        fewest = self.run.config.recovery.min_ranks
        waits = [asyncio.create_task(self._start_rank(ranks, member)) for member in ranks.members]
        try:
            while True:
                done, pending = await asyncio.wait(waits, timeout=1.0)
                for task in done:
                    task.result()
                if not pending:
                    return
                if fewest is not None and len(done) >= fewest and node_lost(self.hiring.placement):
                    late = [member for member, task in zip(ranks.members, waits, strict=True) if not task.done()]
                    for member in late:
                        member.started = member.actor.attach.remote(ranks.position.epoch, ranks.identity)
                    self.absent += late
                    ranks.members = [member for member in ranks.members if member not in late]
                    self.run.say("smaller", f"going on with {len(ranks.members)} ranks", ranks=len(ranks.members))
                    return
        finally:
            for task in waits:
                task.cancel()

    async def _start_rank(self, ranks: RankFleet, member: Member) -> None:
        if member.fresh:
            await ranks.attach(ranks.members.index(member), self._start_seconds(ranks))

    async def _return_absent(self, ranks: RankFleet) -> None:
        """Ranks whose node is there again join the next group."""
        for member in list(self.absent):
            ready, _ = await asyncio.to_thread(ray.wait, [member.started], timeout=0)
            if ready:
                self.absent.remove(member)
                ranks.members = sorted([*ranks.members, member], key=lambda one: one.place)

    def can_grow(self) -> bool:
        """Whether a rank that stayed behind has started meanwhile."""
        return any(ray.wait([member.started], timeout=0)[0] for member in self.absent)

    async def _attached(self, fleet: Fleet, number: int) -> Any:
        """The worker's answer, or None for one that has to be re-made. Raises what a fresh start raised."""
        fresh = fleet.members[number].fresh
        deadline = self._start_seconds(fleet) if fresh else self.run.config.recovery.hang_seconds
        try:
            answer = await fleet.attach(number, deadline)
        except (WorkerError, DeadlineError) as fault:
            if fresh:
                raise
            logging.warning("%s: %s", fleet.name(number), fault.message)
            return None
        same = answer.same if isinstance(answer, RankStatus) else answer
        return answer if same else None

    def _start_seconds(self, fleet: Fleet) -> float:
        cluster, recovery = self.run.config.cluster, self.run.config.recovery
        lost = node_lost(self.hiring.placement)
        return max(cluster.start_timeout_seconds, recovery.node_wait_seconds if lost else 0.0)

    async def stop(self) -> None:
        """End what runs in the background."""
        tasks = list(self.replacing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def how_of(error: BaseException) -> FaultHow:
    """Whether a worker died, hung, or raised."""
    if isinstance(error, WorkerLost):
        return "died"
    return "hung" if isinstance(error, DeadlineError) else "raised"
