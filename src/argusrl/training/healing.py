"""What the driver does about faults while the run goes on. The rule is in recovery/decide.py.

An engine is replaced in the background: the others serve on. Everything else goes back to one boundary: the driver
claims a new epoch (so that calls and files of the time before are refused), re-makes what is broken, restores the
state of the last commit where it was lost, and adopts what the journal holds of the open step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from argusrl.cluster.hang_reports import progress_line
from argusrl.config.secrets import is_secret_reference
from argusrl.errors import (
    ArgusError,
    DeadlineError,
    SampleError,
    StorageError,
    WorkerError,
    WorkerLost,
)
from argusrl.journal.commits import Adopted
from argusrl.recovery.decide import Decision, decide
from argusrl.recovery.faults import Fault, FaultHow, FaultKind
from argusrl.training.bring_up import Hiring
from argusrl.training.calls import call
from argusrl.training.draining import Draining, NodeLeaving
from argusrl.training.fleet import EngineFleet, EpisodeFleet, Fleet, RankFleet
from argusrl.training.left_behind import LeftBehind
from argusrl.training.nodes import Nodes
from argusrl.training.probing import Probes
from argusrl.training.rank_worker import RankStatus
from argusrl.training.replacing import Replacing
from argusrl.training.rollout import together
from argusrl.training.seats import seat_ranks
from argusrl.training.suspects import Suspects

if TYPE_CHECKING:
    from argusrl.training.run import Run

_STUCK_SECONDS = 10.0

HEALABLE = (WorkerError, DeadlineError, StorageError, SampleError, Adopted)
"""What `Healing.recover` can do something about; CorruptionError, a StorageError, is not among it."""


@dataclass
class Healing:
    """Faults of this driver so far, and what is being made anew."""

    run: Run
    hiring: Hiring
    history: list[Fault] = field(default_factory=list)
    suspects: Suspects = field(init=False)
    judged_nodes: dict[str, Decision] = field(default_factory=dict)  # one fault each, however many workers it had
    nodes: Nodes = field(init=False)
    engines: Replacing = field(init=False)
    absent: LeftBehind = field(init=False)
    probes: Probes = field(init=False)
    drains: Draining = field(init=False)
    stragglers: dict[str, int] = field(default_factory=dict)  # the step in which each was last told of

    def __post_init__(self) -> None:
        self.suspects = Suspects(self.run)
        self.nodes = Nodes(self.hiring.placement)
        self.engines = Replacing(self.run, self.hiring, self.nodes, self._judge_engine)
        seconds = self.run.config.cluster.start_timeout_seconds
        self.absent = LeftBehind(self.hiring, self.nodes, self._absent_lost, seconds)
        self.probes = self._probes_of_nodes()
        self.drains = Draining(self, self.probes)

    def _probes_of_nodes(self) -> Probes:
        run, cluster = self.run, self.run.config.cluster
        reports = cluster.kubernetes is not None and cluster.kubernetes.hang_reports
        return Probes(
            run.folder,
            run.attempt,
            self.hiring.logs,
            self.hiring.placement.environment,
            [name for name, value in cluster.environment.items() if is_secret_reference(value)],
            progress=lambda: progress_line(run.state.step + 1, run.config.algorithm.num_steps, run.phase_name),
            hang_seconds=(cluster.call_timeout_seconds, 2 * cluster.start_timeout_seconds) if reports else None,
        )

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

    async def _judge_lost(self, kind: Literal["rank", "engine"], place: int, name: str, fault: ArgusError) -> Decision:
        """Judge the loss of a worker; where its node is gone, that of the node, once for all workers on it."""
        node = await self.nodes.lost_under((kind, place), fault)
        return self._judge_node(node, fault) if node else self.judge(kind, name, how_of(fault), fault.message)

    def _judge_node(self, node: str, fault: ArgusError) -> Decision:
        if node not in self.judged_nodes:
            self.judged_nodes[node] = self.judge("node", f"node {node[:8]}", "died", f"a node is lost: {fault.message}")
        return self.judged_nodes[node]

    async def _judge_engine(self, number: int, fault: ArgusError) -> Decision:
        return await self._judge_lost("engine", number, self.run.workers.engines.name(number), fault)

    # ---- everything else

    async def prepare(self, error: BaseException) -> None:
        """Judge what ended a step; wait where that is the answer. Raises what the rule does not heal here."""
        run = self.run
        if run.leaving.is_set():
            await self.drains.empty()
        if isinstance(error, NodeLeaving):
            return
        if isinstance(error, Adopted):
            run.say("adopted", f"epoch {error.commit.epoch} had committed step {error.commit.step} first", warning=True)
            return
        if lost := await self._lost_node(error):
            kind, decision = "node", self._judge_node(*lost)
        else:
            kind, member, how = self._classify(error)
            decision = self.judge(kind, member, how, getattr(error, "message", str(error)))
        if decision.action in ("restart_driver", "stop"):
            # Not the error itself: some codes say to the supervisor that trying again is of no use.
            final = WorkerError(decision.reason) if decision.action == "restart_driver" else error
            if isinstance(final, ArgusError):
                run.give_up(final)  # or else the loop would take it for one more fault to heal
            raise final
        if decision.action == "replace_engine":
            self.engines.replace(self.run.workers.engines.names.index(member))
        if kind == "sample":
            self.suspects.isolate()
        if decision.action == "quarantine":
            self.suspects.leave_out(decision.reason)
        if kind == "storage":
            await run.wait_for_storage()

    async def _lost_node(self, error: BaseException) -> tuple[str, ArgusError] | None:
        """The lost node of a rank, and that rank's fault; None where every rank's node lives."""
        ranks, episodes = self.run.workers.ranks, self.run.workers.episodes
        for fault in (*ranks.losses.values(), *episodes.losses.values(), error):
            await self.nodes.lost_lately(fault)  # waits for Ray's verdict about a worker that cannot be reached
        for number, member in enumerate(ranks.members):
            if node := self.nodes.lost_node(("rank", member.place)):
                return node, ranks.losses.get(ranks.name(number)) or WorkerLost(f"{ranks.name(number)} was on it")
        for name, loss in episodes.losses.items():
            if node := self.nodes.lost_node(("w", int(name.rpartition(" ")[2]))):
                return node, loss
        return None

    def recovered(self, fault: BaseException, seconds: float) -> None:
        """The run goes on."""
        what = getattr(fault, "message", str(fault))
        if isinstance(fault, NodeLeaving):
            self.run.say("moved", f"going on after {seconds:.1f} s: {what}", seconds=round(seconds, 3))
            return
        self.run.say(
            "recovered",
            f"going on after {seconds:.1f} s: {what}",
            seconds=round(seconds, 3),
            epoch=self.run.epoch.number,
        )

    def _classify(self, error: BaseException) -> tuple[FaultKind, str, FaultHow]:
        if isinstance(error, StorageError):
            return "storage", str(self.run.folder.path), "raised"
        if isinstance(error, SampleError) and error.keys:
            return "sample", self.suspects.accuse(error.keys), "raised"
        member = self._lost_member() or getattr(error, "member", "")
        if accused := self.suspects.accused_by_death(member):
            return "sample", accused, how_of(error)
        kinds: dict[str, FaultKind] = {"rank": "rank", "episode worker": "episode_worker", "engine": "engine"}
        kind = kinds.get(member.rpartition(" ")[0], "rank")
        return kind, member or type(error).__name__, how_of(error)

    def _lost_member(self) -> str:
        """Who the watch found lost: its death explains what the others raise."""
        for fleet in (self.run.workers.ranks, self.run.workers.episodes):
            if fleet.losses:
                return next(iter(fleet.losses))
        return ""

    # ---- bringing up, first or again

    async def engines_up(self) -> None:
        """All engines serve, or are being replaced. Raises what a fresh start raised."""
        engines = self.run.workers.engines
        engines.on_lost = self.engines.lost
        homes = await self.nodes.have(range(len(engines.members)))  # engines have the first bundles
        for number in range(len(engines.members)):
            moved = homes.get(number) != self.nodes.where.get(("engine", number))
            if moved or number not in homes:
                self.engines.replace(number)
        places = [n for n in range(len(engines.members)) if n not in self.engines]
        await together(self._engine_up(engines, number) for number in places)

    async def _engine_up(self, engines: EngineFleet, number: int) -> None:
        attached = await self._attached(engines, number)
        if number in self.engines:  # the watch found it lost meanwhile
            return
        if attached:
            if number not in engines.serving:
                engines.admit(number)
        else:
            engines.serving.discard(number)
            self.engines.lost(number, WorkerLost(f"{engines.name(number)} cannot go on").of(engines.name(number)))

    async def episodes_up(self) -> None:
        """All episode workers answer and know the engines."""
        episodes = self.run.workers.episodes

        async def up(number: int) -> None:
            while True:
                try:
                    if await self._attached(episodes, number):
                        await self._locate(episodes, number)
                        return
                except WorkerLost as fault:
                    if not await self.nodes.lost_lately(fault):
                        raise
                episodes.replace(number)

        await self.nodes.usable(self.run.config.recovery.node_wait_seconds)  # ranks wait for nodes, and say so
        await together(up(number) for number in range(len(episodes.members)))
        episodes.losses.clear()
        await episodes.set_engines(self.run.workers.engines.handles())

    async def _locate(self, episodes: EpisodeFleet, number: int) -> None:
        """Note on which node an episode worker is: nobody chose it."""
        member = episodes.members[number]
        asked = member.actor.node.remote(self.run.epoch.number)
        node = await call(asked, self.run.config.recovery.hang_seconds, "node", episodes.name(number))
        self.nodes.where["w", member.place] = node

    async def ranks_up(self) -> bool:
        """All ranks are in one group. True if they are new in it: their state has to be loaded."""
        ranks = self.run.workers.ranks
        ranks.on_straggler = self.straggles
        ranks.members = sorted([*ranks.members, *self.absent.take()], key=lambda one: one.place)
        await seat_ranks(self.run, self.hiring, self.nodes, self.absent)
        answers = await together(self._attached(ranks, number) for number in range(len(ranks.members)))
        groups = {answer.group if isinstance(answer, RankStatus) else "" for answer in answers}
        if len(groups) == 1 and groups != {""} and not ranks.losses and self._complete():
            return False
        for number, answer in enumerate(answers):
            if answer is None:
                ranks.replace(number)
        fresh = [number for number, member in enumerate(ranks.members) if member.fresh]
        await together(self._attached(ranks, number) for number in fresh)
        ranks.losses.clear()
        await ranks.connect(f"ranks-{self.run.epoch.number}", self._start_seconds())
        self.run.conditions["ranks"] = len(ranks.members)
        return True

    def straggles(self, name: str, ratio: float) -> None:
        """Say that a rank is slow, once per step; it makes progress, so it is left alone."""
        step = self.run.workers.position.step
        if self.stragglers.get(name) != step:
            self.stragglers[name] = step
            text = f"step {step}: {name} was {ratio:.0f} times slower than the fastest rank"
            self.run.say("straggler", text, warning=True, step=step, member=name, ratio=round(ratio, 1))

    def _complete(self) -> bool:
        return self.run.conditions["ranks"] == len(self.run.workers.ranks.members)

    async def _absent_lost(self, place: int, fault: ArgusError) -> bool:
        """A rank that was left behind did not come back; whether to try again."""
        decision = await self._judge_lost("rank", place, f"rank {place}", fault)
        if decision.action in ("recover", "wait"):
            return True
        self.run.give_up(WorkerError(decision.reason))
        return False

    def can_grow(self) -> bool:
        """Whether a rank that stayed behind has started meanwhile."""
        return bool(self.absent.ready)

    async def _attached(self, fleet: Fleet, number: int) -> Any:
        """The worker's answer, or None for one that has to be re-made. Raises what a fresh start raised."""
        member = fleet.members[number]
        fresh = member.fresh
        deadline = self._start_seconds() if fresh else self.run.config.recovery.hang_seconds
        stuck = isinstance(fleet, RankFleet) and bool(fleet.losses)
        if not fresh and (stuck or await self.nodes.lost_lately()):  # it may wait for ever for one that is lost
            deadline = min(deadline, _STUCK_SECONDS)
        try:
            answer = await fleet.attach(number, deadline)
        except (WorkerError, DeadlineError) as fault:
            if fresh:
                if fleet.members[number] is member:
                    fleet.replace(number)  # whoever tries again finds another one
                raise
            logging.warning("%s: %s", fleet.name(number), fault.message)
            return None
        same = answer.same if isinstance(answer, RankStatus) else answer
        return answer if same else None

    def _start_seconds(self) -> float:
        return self.run.config.cluster.start_timeout_seconds

    def start(self) -> None:
        """Begin what runs in the background. A machine of one's own has no probe and nobody who drains it."""
        if self.run.config.cluster.address != "local":
            self.probes.start()
            self.drains.start()

    async def stop(self, *, sealed: bool) -> None:
        """End what runs in the background."""
        await asyncio.gather(self.engines.stop(), self.absent.stop(), return_exceptions=True)
        await self.drains.stop(sealed=sealed)
        await self.probes.stop()


def how_of(error: BaseException) -> FaultHow:
    """Whether a worker died, hung, or raised."""
    if isinstance(error, WorkerLost):
        return "died"
    return "hung" if isinstance(error, DeadlineError) else "raised"
