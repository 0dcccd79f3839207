"""All workers of a run as the driver sees them: engines, ranks and episode workers.

Each call goes to every worker of its kind, carries (epoch, step), and has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from argusrl.journal.episodes import SealedStep
from argusrl.rollout.engine import EngineProgress
from argusrl.rollout.player import PlaySettings
from argusrl.training.calls import call, call_all
from argusrl.training.engine_worker import EngineProof
from argusrl.training.episode_worker import AdoptedStep, GroupOrder, Score
from argusrl.training.rank_worker import Published, RankUpdate, UpdateReport
from argusrl.types import AdapterRef, EpisodeFailure, TrajectoryRef


@dataclass(slots=True)
class Position:
    """Where the driver is; goes along with every call, and workers refuse lower ones."""

    epoch: int
    step: int = 0


@dataclass
class Fleet:
    """All workers of one kind."""

    noun: ClassVar[str]  # for messages
    actors: list[Any]
    position: Position
    deadline_seconds: float

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        """The same call to every worker."""
        return await self._each(method, [arguments] * len(self.actors))

    async def _each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """A call to every worker with its own arguments."""
        references = [self._start(actor, method, *own) for actor, own in zip(self.actors, arguments, strict=True)]
        return await call_all(references, self.deadline_seconds, f"{method} of {self.noun}")

    async def _one(self, number: int, method: str, *arguments: Any, what: str = "") -> Any:
        """A call to one worker; numbers beyond the last start over."""
        number %= len(self.actors)
        reference = self._start(self.actors[number], method, *arguments)
        return await call(reference, self.deadline_seconds, what or f"{method} of {self.noun} {number}")

    def _start(self, actor: Any, method: str, *arguments: Any) -> Any:
        return getattr(actor, method).remote(self.position.epoch, self.position.step, *arguments)

    async def ready(self, deadline_seconds: float) -> None:
        """Raises what a worker's start raised."""
        await call_all([actor.ready.remote() for actor in self.actors], deadline_seconds, f"start of {self.noun}")


class EngineFleet(Fleet):
    """All engines."""

    noun = "engine"

    async def set_canary(self, canary: TrajectoryRef) -> None:
        await self._all("set_canary", canary)

    async def load_adapter(self, reference: AdapterRef) -> None:
        """Load a published adapter; needs weights, not the cache. Raises AdapterRefused."""
        await self._all("load_adapter", reference)

    async def prove(self, version: int) -> list[EngineProof]:
        """One proof per engine; needs the cache."""
        return await self._all("prove", version)

    async def sleep(self) -> None:
        await self._all("sleep")

    async def wake_weights(self) -> None:
        await self._all("wake_weights")

    async def wake_cache(self) -> None:
        await self._all("wake_cache")

    async def progress(self) -> list[EngineProgress]:
        return await call_all(
            [actor.progress.remote() for actor in self.actors], self.deadline_seconds, "progress of engine"
        )


class RankFleet(Fleet):
    """All training ranks; they act together."""

    noun = "rank"

    async def connect(self, deadline_seconds: float) -> None:
        """Build the process group and the model on all ranks. Raises what a rank's start raised."""
        address = await call(self.actors[0].rendezvous.remote(), deadline_seconds, "start of rank 0")
        await call_all([actor.connect.remote(address) for actor in self.actors], deadline_seconds, "start of rank")

    async def update(self, orders: Sequence[list[RankUpdate]]) -> UpdateReport:
        """Run all optimizer updates of a step; `orders` has one list of updates per rank."""
        reports: list[UpdateReport] = await self._each("update", [(own,) for own in orders])
        return reports[0]

    async def publish(self, version: int) -> AdapterRef:
        """Write the adapter to the run folder; durable on return."""
        references: list[AdapterRef] = await self._all("publish", version)
        return references[0]

    async def set_canary(self, canary: TrajectoryRef) -> list[float]:
        """Take the canary; [R] its log-probabilities under the base model."""
        return list((await self._all("set_canary", canary))[0])

    async def canary(self) -> Published:
        """The canary's log-probabilities now, and the logical digest of adapter, Adam and RNG."""
        reports: list[Published] = await self._all("canary")
        return reports[0]

    async def save_checkpoint(self, commit_sha256: str, state_digest: str) -> None:
        """Stage a checkpoint of the state after this step; it is written in the background."""
        await self._all("save_checkpoint", commit_sha256, state_digest)

    async def finish_checkpoint(self) -> None:
        """Returns when the checkpoint under way is durable."""
        await self._all("finish_checkpoint")

    async def load_checkpoint(self, folder: str) -> None:
        await self._all("load_checkpoint", folder)

    async def load_adapter(self, folder: str) -> None:
        """Take the tensors of a published adapter in place of one's own."""
        await self._all("load_adapter", folder)

    async def offload(self) -> None:
        await self._all("offload")

    async def onload(self) -> None:
        await self._all("onload")


class EpisodeFleet(Fleet):
    """All episode workers; each group is played by one of them."""

    noun = "episode worker"

    async def begin(self) -> None:
        """Open the journal segments of the current step."""
        await self._all("begin")

    async def adopt(self, adapter_sha256: str, indices: Sequence[int]) -> AdoptedStep:
        """Take over what interrupted attempts finished in the current step; the first worker does it for all."""
        adopted: AdoptedStep = await self._one(0, "adopt", adapter_sha256, list(indices))
        return adopted

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
