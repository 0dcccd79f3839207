"""All workers of a run as the driver sees them: engines, ranks and episode workers.

Each call goes to every worker of its kind, carries (epoch, step), and has a deadline. A worker has a place (its
number); the process there may be replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import ray

from argusrl.errors import ArgusError, DeadlineError, WorkerError, WorkerLost
from argusrl.journal.episodes import SealedStep
from argusrl.rollout.engine import EngineProgress
from argusrl.rollout.player import PlaySettings
from argusrl.training.adapter_memory import AdapterMemory
from argusrl.training.calls import call, call_all, settle
from argusrl.training.engine_worker import EngineProof
from argusrl.training.episode_worker import AdoptedStep, GroupOrder, Score
from argusrl.training.rank_worker import RankUpdate, RowOrder, UpdateReport
from argusrl.types import AdapterRef, EpisodeFailure, TrajectoryRef

STRAGGLER_RATIO = 5.0
STRAGGLER_SECONDS = 0.02  # what is faster than this is not measured


@dataclass(slots=True)
class Position:
    """Where the driver is; goes along with every call, and workers refuse lower ones."""

    epoch: int
    step: int = 0  # that ranks train
    ahead: int = 0  # how much later the step is that is sampled


@dataclass(slots=True)
class Member:
    """The process at one place. `started` is the call that starts it, where that is not its constructor."""

    place: int
    actor: Any
    started: Any = None
    fresh: bool = True  # not attached yet, and started by this driver: what is wrong with it is a fault of its start


@dataclass
class Fleet:
    """All workers of one kind."""

    noun: ClassVar[str]  # for messages
    samples: ClassVar[bool] = False  # works on the step that is sampled, not on the one that is trained
    members: list[Member]
    make: Callable[[int], Member]  # begins to start the worker of a place
    identity: str  # of run, config and code: a worker with another one is not ours
    position: Position
    deadline_seconds: float
    losses: dict[str, ArgusError] = field(default_factory=dict)  # by name: who was found lost and is being re-made

    @property
    def actors(self) -> list[Any]:
        return [member.actor for member in self.members]

    @property
    def names(self) -> list[str]:
        return [self.name(number) for number in range(len(self.members))]

    @property
    def _step(self) -> int:
        return self.position.step + (self.position.ahead if self.samples else 0)

    def name(self, number: int) -> str:
        """For messages and events: "rank 1"."""
        return f"{self.noun} {self.members[number].place}"

    def replace(self, number: int) -> None:
        """Kill the process of a member and begin to start another one at its place."""
        member = self.members[number]
        kill(member.actor)
        self.members[number] = self.make(member.place)

    async def attach(self, number: int, deadline_seconds: float) -> Any:
        """Wait for a worker and take it over from whoever drove it. Raises what its start raised, WorkerLost."""
        member = self.members[number]
        if member.started is not None:
            await call(member.started, deadline_seconds, "start", self.name(number))
        reference = member.actor.attach.remote(self.position.epoch, self.identity)
        answer = await call(reference, deadline_seconds, "start", self.name(number))
        member.fresh, member.started = False, None
        return answer

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        """The same call to every worker."""
        return await self._each(method, [arguments] * len(self.members))

    async def _each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """A call to every worker with its own arguments."""
        self._raise_losses()
        references = [self._start(actor, method, *own) for actor, own in zip(self.actors, arguments, strict=True)]
        return await call_all(references, self.deadline_seconds, method, self.names)

    async def _one(self, number: int, method: str, *arguments: Any, what: str = "") -> Any:
        """A call to one worker; numbers beyond the last start over."""
        self._raise_losses()
        number %= len(self.members)
        reference = self._start(self.members[number].actor, method, *arguments)
        return await call(reference, self.deadline_seconds, what or method, self.name(number))

    def _raise_losses(self) -> None:
        for fault in self.losses.values():  # who takes its place knows nothing yet, and may wait for a node
            raise fault

    def _start(self, actor: Any, method: str, *arguments: Any) -> Any:
        return getattr(actor, method).remote(self.position.epoch, self._step, *arguments)

    def _pair(self, actor: Any, method: str, *arguments: Any) -> tuple[Any, Any]:
        """A call with two results: a small one for the driver, and an object that it only passes on."""
        two = getattr(actor, method).options(num_returns=2)
        small, large = two.remote(self.position.epoch, self._step, *arguments)
        return small, large


def kill(actor: Any) -> None:
    """End the process behind an actor, whatever it is doing; nothing happens where it is gone."""
    with suppress(Exception):
        ray.kill(actor)


@dataclass
class EngineFleet(Fleet):
    """All engines. Calls go to those that serve; one that is lost on the way is told to `on_lost`, not raised."""

    noun = "engine"
    samples = True
    serving: set[int] = field(default_factory=set)
    on_lost: Callable[[int, ArgusError], None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    memory: AdapterMemory = field(default_factory=AdapterMemory)

    def admit(self, number: int) -> None:
        """From now on this engine serves."""
        self.serving.add(number)
        self.changed.set()
        self.changed = asyncio.Event()

    def lost(self, number: int, fault: ArgusError) -> None:
        """This engine serves no more. Raises the fault where nobody replaces engines."""
        if number in self.serving:
            self.serving.discard(number)
            if self.on_lost is None:
                raise fault
            self.on_lost(number, fault)

    async def someone(self, deadline_seconds: float) -> None:
        """Wait until an engine serves. Raises WorkerError after the deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_seconds):
                while not self.serving:
                    await self.changed.wait()
        if not self.serving:
            raise WorkerError(f"no engine came back within {deadline_seconds:.0f} s", "attempts/*/logs/engine*.log")

    def handles(self) -> dict[int, Any]:
        """The actors that serve, by number."""
        return {number: self.members[number].actor for number in sorted(self.serving)}

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        numbers = sorted(self.serving)
        asked = [self.members[number].actor for number in numbers]
        references = [self._start(actor, method, *arguments) for actor in asked]
        outcomes = await settle(references, self.deadline_seconds, method, [self.name(number) for number in numbers])
        answers = []
        for number, actor, outcome in zip(numbers, asked, outcomes, strict=True):
            if isinstance(outcome, (WorkerLost, DeadlineError)):
                if self.members[number].actor is actor:  # or else another one took its place meanwhile
                    self.lost(number, outcome)
            elif isinstance(outcome, ArgusError):
                raise outcome
            else:
                answers.append(outcome)
        return answers

    async def set_canary(self, canary: TrajectoryRef) -> None:
        await self._all("set_canary", canary)

    async def load_adapter(self, reference: AdapterRef) -> None:
        """Load an adapter; needs weights, not the cache. Raises AdapterRefused.

        From memory, where it is; else one engine reads the folder for all.
        """
        for number in sorted(self.serving):
            try:
                files = await self._files(reference, number)
            except (WorkerLost, DeadlineError) as fault:
                self.lost(number, fault)
                continue
            with self.memory.trusted():
                await self._all("load_adapter", reference, files)
            return

    async def prove(self, version: int) -> list[EngineProof]:
        """One proof per engine that serves; needs the cache."""
        return await self._all("prove", version)

    async def bring_up_to(self, number: int, canary: TrajectoryRef, adapter: AdapterRef) -> EngineProof:
        """Teach one engine that does not serve yet what the others know; its proof."""
        await self._one(number, "set_canary", canary)
        with self.memory.trusted():
            await self._one(number, "load_adapter", adapter, await self._files(adapter, number))
        proof: EngineProof = await self._one(number, "prove", adapter.version)
        return proof

    async def _files(self, reference: AdapterRef, reader: int) -> Any:
        """Where the adapter lies in Ray's object store; `reader` reads its folder if it does not."""

        async def read() -> Any:
            done, files = self._pair(self.members[reader].actor, "read_adapter", reference)
            await call(done, self.deadline_seconds, "read_adapter", self.name(reader))
            return files

        return await self.memory.files(reference, read)

    async def sleep(self) -> None:
        await self._all("sleep")

    async def wake_weights(self) -> None:
        await self._all("wake_weights")

    async def wake_cache(self) -> None:
        await self._all("wake_cache")

    async def progress(self) -> dict[Any, EngineProgress]:
        """Counters of the engines that serve, by actor: those of a new one begin at zero. Silent ones are left out."""
        asked = self.handles()
        references = [actor.progress.remote(self.position.epoch) for actor in asked.values()]
        answers = await settle(references, self.deadline_seconds, "progress", [self.name(n) for n in asked])
        found = zip(asked.values(), answers, strict=True)
        return {actor: answer for actor, answer in found if isinstance(answer, EngineProgress)}


@dataclass
class RankFleet(Fleet):
    """All training ranks; they act together. `members` are the ranks of the present group."""

    noun = "rank"
    on_straggler: Callable[[str, float], None] | None = None

    async def connect(self, group: str, deadline_seconds: float) -> None:
        """Build the process group and the model on all ranks. Raises what a rank's start raised."""
        epoch, ranks = self.position.epoch, len(self.members)
        address = await call(self.actors[0].rendezvous.remote(epoch), deadline_seconds, "start", self.name(0))
        references = [
            actor.connect.remote(epoch, address, group, rank, ranks) for rank, actor in enumerate(self.actors)
        ]
        await call_all(references, deadline_seconds, "start", self.names)

    async def update(self, orders: Sequence[list[RankUpdate]]) -> UpdateReport:
        """Run all optimizer updates of a step; `orders` has one list of updates per rank. Rank 0's report.

        A rank whose own work took many times longer than that of others is told to `on_straggler`, never killed for it.
        """
        reports: list[UpdateReport] = await self._each("update", [(own,) for own in orders])
        fastest = min(report.own_seconds for report in reports)
        for number, report in enumerate(reports):
            ratio = report.own_seconds / max(fastest, STRAGGLER_SECONDS)
            if ratio > STRAGGLER_RATIO and self.on_straggler is not None:
                self.on_straggler(self.name(number), ratio)
        return replace(reports[0], peak_bytes=max(report.peak_bytes for report in reports))

    async def recheck(self, orders: Sequence[list[RowOrder]]) -> bool:
        """Whether each rank's rows get the same log-probabilities, bit for bit, on the next rank as on their own."""
        own = await self._each("logprob_digest", [(rows,) for rows in orders])
        moved = [orders[(rank + 1) % len(orders)] for rank in range(len(orders))]
        again = await self._each("logprob_digest", [(rows,) for rows in moved])
        return all(own[(rank + 1) % len(own)] == digest for rank, digest in enumerate(again))

    async def publish(self, version: int) -> tuple[AdapterRef, Any]:
        """The adapter, and where its files lie in Ray's object store. Its folder is being written."""
        self._raise_losses()
        pairs = [self._pair(actor, "publish", version) for actor in self.actors]
        references: list[AdapterRef] = await call_all(
            [small for small, _ in pairs], self.deadline_seconds, "publish", self.names
        )
        return references[0], pairs[0][1]

    async def published(self) -> None:
        """Returns when the adapter's folder is durable."""
        await self._one(0, "published")

    async def set_canary(self, canary: TrajectoryRef) -> list[float]:
        """Take the canary; [R] its log-probabilities under the base model."""
        return list((await self._all("set_canary", canary))[0])

    async def canary(self) -> list[float]:
        """[R] the canary's log-probabilities now."""
        return list((await self._all("canary"))[0])

    async def state_digest(self) -> str:
        """The logical digest of adapter, Adam and RNG."""
        return str((await self._all("state_digest"))[0])

    def save_checkpoint(self, commit_sha256: str, state_digest: str) -> Coroutine[Any, Any, Any]:
        """Begin to stage a checkpoint of the state after this step, which is then written in the background.

        Calls that follow find it staged. Await the answer for what went wrong, with the write before, too.
        """
        self._raise_losses()
        references = [self._start(actor, "save_checkpoint", commit_sha256, state_digest) for actor in self.actors]
        return call_all(references, self.deadline_seconds, "save_checkpoint", self.names)

    async def finish_checkpoint(self) -> None:
        """Returns when the checkpoint under way is durable."""
        await self._all("finish_checkpoint")

    async def load_checkpoint(self, folder: str) -> None:
        await self._all("load_checkpoint", folder)

    async def load_adapter(self, folder: str) -> float:
        """Take the tensors of a published adapter in place of one's own; the largest |difference| between them."""
        return max(await self._all("load_adapter", folder))

    async def offload(self) -> None:
        await self._all("offload")

    async def onload(self) -> None:
        await self._all("onload")


class EpisodeFleet(Fleet):
    """All episode workers; each group is played by one of them."""

    noun = "episode worker"
    samples = True

    async def set_engines(self, engines: dict[int, Any]) -> int:
        """Tell the workers which engines serve. Tokens of lost engines that they went on from since the last call.

        One that has not been attached yet is not waited for: it is told when it is.
        """
        self._raise_losses()
        known = [member for member in self.members if not member.fresh]
        references = [self._start(member.actor, "set_engines", engines) for member in known]
        names = [f"{self.noun} {member.place}" for member in known]
        return sum(await call_all(references, self.deadline_seconds, "set_engines", names)) if known else 0

    async def begin(self) -> None:
        """Open the journal segments of the current step."""
        await self._all("begin")

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Have the workers read what they will play in the next step. Nobody waits for it."""
        for number, actor in enumerate(self.actors):
            own = [index for index in indices if index % len(self.members) == number]
            self._start(actor, "read_ahead", own)

    async def adopt(self, adapter_sha256: str, indices: Sequence[int]) -> list[AdoptedStep]:
        """Take over what lower epochs left in the current step; the first worker's answer has what is finished."""
        arguments = [(number == 0, adapter_sha256, list(indices)) for number in range(len(self.members))]
        return await self._each("adopt", arguments)

    async def make_canary(self, settings: PlaySettings) -> TrajectoryRef:
        canary: TrajectoryRef = await self._one(0, "make_canary", settings)
        return canary

    async def play(
        self, order: GroupOrder, settings: PlaySettings, attempt: int
    ) -> list[TrajectoryRef | EpisodeFailure]:
        """Play samples of one training prompt."""
        what = f"group of prompt {order.index}"
        results: list[TrajectoryRef | EpisodeFailure]
        results = await self._one(order.index, "play", order, settings, attempt, what=what)
        return results

    async def evaluate(self, order: GroupOrder, settings: PlaySettings) -> list[Score]:
        """Play samples of one held-out prompt."""
        what = f"evaluation of prompt {order.index}"
        scores: list[Score] = await self._one(order.index, "evaluate", order, settings, what=what)
        return scores

    async def seal(self) -> list[SealedStep]:
        """Close the segments of the current step."""
        return await self._all("seal")

    async def close(self) -> None:
        await asyncio.gather(*(actor.close.remote() for actor in self.actors))


@dataclass(slots=True)
class Workers:
    """Everything that works for a run."""

    engines: EngineFleet
    ranks: RankFleet
    episodes: EpisodeFleet
    position: Position
    logs: Path
    standbys: list[Any]  # engine workers with everything imported, not started

    def actors(self) -> list[Any]:
        """Every process, those that start or wait included."""
        return [*self.standbys, *self.engines.actors, *self.ranks.actors, *self.episodes.actors]
