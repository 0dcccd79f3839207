"""The actor that plays episodes: prompts, environments, rewards on CPUs; turns from engines; records to the journal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray

from argusrl.config.sections import Config
from argusrl.data.images import shrunk
from argusrl.data.source import PromptSource, SelectedSource, open_source
from argusrl.environments.sessions import open_sessions
from argusrl.errors import WorkerError
from argusrl.journal.episodes import EpisodeJournal, Leftovers, SealedStep
from argusrl.recovery.failpoints import How
from argusrl.rewards.combined import open_rewards
from argusrl.rollout.engine import SampleRequest, Span
from argusrl.rollout.player import EpisodePlayer, PlaySettings, Sample, Unrecorded
from argusrl.rollout.rendering import Renderer
from argusrl.rollout.seeds import derive_seed
from argusrl.storage.layout import RunFolder
from argusrl.training.engine_links import EngineLinks
from argusrl.training.fence import Fence
from argusrl.training.process import Lease, many_imports, start_logging
from argusrl.training.reading_ahead import ReadingAhead
from argusrl.training.shooting import shoot_oneself
from argusrl.types import EpisodeFailure, Trajectory, TrajectoryKey, TrajectoryRef, Unfinished

T = TypeVar("T")

_CANARY_IMAGE_PIXELS = 112  # the longest side of its images


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOrder:
    """Play these samples of one prompt on one engine."""

    index: int  # row of the prompt source
    samples: tuple[int, ...]  # numbers of the trajectories in their group
    engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedStep:
    """What interrupted attempts had finished, and which row of the prompt source each prompt id is."""

    leftovers: Leftovers  # without the unfinished ones, which stay with the workers
    rows: dict[str, int]
    unfinished: int  # replies and episodes that this worker can go on with
    unfinished_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What evaluation keeps of a trajectory."""

    prompt_id: str
    sample: int
    reward: float
    text: str
    failed: str = ""  # the reason, for an episode that counts for nothing


@dataclass(frozen=True, slots=True)
class _Engine:
    """The engines as the player sees them: one, whichever it is."""

    links: EngineLinks
    epoch: int
    step: int
    home: int

    def sample(self, request: SampleRequest) -> AsyncIterator[Span]:
        return self.links.sample(self.epoch, self.step, self.home, request)


class EpisodeWorker:
    """Holds no model. One journal writer per step and epoch; several groups play at the same time."""

    def __init__(
        self,
        name: str,
        config: Config,
        folder: RunFolder,
        bad_rows: dict[str, Sequence[int]],
        engines: int,
        identity: str,
        logs: Path,
    ) -> None:
        start_logging(logs / f"{name}.log")
        self.name, self.config, self.folder, self.identity = name, config, folder, identity
        self.fence = Fence()
        self.lease = Lease(config.recovery.orphan_seconds)
        self.links: EngineLinks | None = None
        with many_imports():
            self.renderer = Renderer.of(config.model)
        self.sources = {split: open_good_rows(config, split, bad) for split, bad in bad_rows.items()}
        self.ahead = ReadingAhead(self.sources["train"])
        self.sessions = open_sessions(config.environment)
        self.rewards = open_rewards(config.rewards, processes=config.cluster.reward_processes)
        self.player = EpisodePlayer(self.renderer, self.sessions.new, self.rewards)
        self.journal: EpisodeJournal | None = None
        self.unfinished: Mapping[TrajectoryKey, Unfinished] = {}
        self.flush = _GroupCommit()
        self.playing: set[asyncio.Task[Any]] = set()
        self.begun: set[TrajectoryKey] = set()  # what is being played of the training set
        groups = 2 * config.engine.max_sequences * engines
        groups //= config.algorithm.group_size * config.cluster.episode_workers
        self.slots = asyncio.Semaphore(max(1, groups))

    async def attach(self, epoch: int, identity: str) -> bool:
        """Take a driver's first call: stop what the one before asked for. False: this worker is of another kind."""
        self.fence.enter(epoch)
        self.lease.renew()
        await self._stop_playing()
        if self.links is not None:  # engines forget what they owed to it: the next driver's links have another name
            self.links.close()
            self.links = None
        if self.journal is not None:
            await asyncio.to_thread(self.journal.abandon)
            self.journal = None
        self.unfinished = {}
        return identity == self.identity

    async def beat(self, epoch: int) -> None:
        """Answers while the worker's loop runs."""
        self.fence.check_epoch(epoch)
        self.lease.renew()

    async def node(self, epoch: int) -> str:
        """Ray's id of the node that this worker is on."""
        self.fence.check_epoch(epoch)
        return str(ray.get_runtime_context().get_node_id())

    async def unfinished_samples(self, epoch: int) -> int:
        """How many trajectories this worker is playing."""
        self.fence.check_epoch(epoch)
        return len(self.begun)

    async def die(self, epoch: int, shot: int, how: How) -> None:
        """A rehearsal's shot."""
        self.fence.check_epoch(epoch)
        shoot_oneself(how)

    async def set_engines(self, epoch: int, step: int, engines: Mapping[int, Any]) -> int:
        """The engines that serve now, by number; replies of others go on at these.

        Returns how many tokens of lost engines were gone on from since the last call.
        """
        self.fence.check(epoch, step)
        if self.links is None:
            self.links = EngineLinks(f"{self.name}-{id(self):x}-e{epoch}")
        self.links.set(engines)
        return self.links.take_continued_tokens()

    async def begin(self, epoch: int, step: int) -> None:
        """Open this worker's segments of a step."""
        self.fence.check(epoch, step)
        self.journal = EpisodeJournal(self.folder, step=step, epoch=epoch, writer=self.name.partition(".")[0])
        self.flush = _GroupCommit()  # a slow fsync of the journal before says nothing about this one
        self.unfinished = {}

    async def adopt(
        self, epoch: int, step: int, finished: bool, adapter_sha256: str, indices: Sequence[int]
    ) -> AdoptedStep:
        """Take over what lower epochs left in this step under the committed adapter.

        One worker copies what is `finished`; every worker reads for itself what it can go on with.
        """
        self.fence.check(epoch, step)
        assert self.journal is not None
        leftovers = await asyncio.to_thread(self.journal.adopt, adapter_sha256, finished=finished, unfinished=True)
        self.fence.check(epoch, step)  # a newer epoch reads for itself
        self.unfinished = leftovers.unfinished
        rows = {(await self.ahead.take(index)).id: index for index in indices} if finished else {}
        return AdoptedStep(
            leftovers=replace(leftovers, unfinished={}),
            rows=rows,
            unfinished=len(self.unfinished),
            unfinished_tokens=sum(
                len(one.ids) + sum(len(turn.response_ids) for turn in one.turns) for one in self.unfinished.values()
            ),
        )

    async def read_ahead(self, epoch: int, step: int, indices: Sequence[int]) -> None:
        """Begin to read what is played in the next step."""
        self.fence.check(epoch, step)
        self.ahead.begin(indices)

    async def play(
        self, epoch: int, step: int, order: GroupOrder, settings: PlaySettings, attempt: int
    ) -> list[TrajectoryRef | EpisodeFailure]:
        """Play samples of one group of the training set; durable in the journal when this returns."""
        self.fence.check(epoch, step)
        return await self._stoppable(self._play(epoch, step, order, settings, attempt))

    async def _play(
        self, epoch: int, step: int, order: GroupOrder, settings: PlaySettings, attempt: int
    ) -> list[TrajectoryRef | EpisodeFailure]:
        journal = self.journal
        assert journal is not None
        prompt = await self.ahead.take(order.index)
        seed = self.config.run.seed
        environment_seed = derive_seed(seed, "environment", prompt.id)
        samples = []
        for number in order.samples:
            key = TrajectoryKey(step, prompt.id, number)
            begun = self.unfinished.get(key) if attempt == 0 else None
            samples.append(Sample(key=key, seed=derive_seed(seed, step, prompt.id, number), unfinished=begun))
        results: dict[TrajectoryKey, TrajectoryRef | EpisodeFailure] = {}

        def on_end(outcome: Trajectory | EpisodeFailure, image_patches: int) -> None:
            self.begun.discard(outcome.key)
            if isinstance(outcome, Trajectory):
                results[outcome.key] = journal.finished(outcome, image_patches=image_patches)
            else:
                journal.failed(outcome)
                results[outcome.key] = outcome

        async with self.slots:
            for sample in samples:
                self.begun.add(sample.key)
                journal.started(
                    sample.key,
                    attempt=attempt,
                    seed=sample.seed,
                    adapter_version=settings.adapter_version or 0,
                    adapter_sha256=settings.adapter_sha256,
                    environment={"kind": self.config.environment.kind, "seed": environment_seed, **prompt.info},
                )
            await self.flush(journal)
            await self.player.play_group(
                prompt,
                samples,
                environment_seed,
                self._engine(epoch, step, order.engine),
                journal,
                settings,
                on_end,
                lambda key, reason: logging.warning("%s cannot be continued and starts whole: %s", key, reason),
            )
            await self.flush(journal)
        return [results[sample.key] for sample in samples]

    async def seal(self, epoch: int, step: int) -> SealedStep:
        """Close this step's segments; only then may a plan name them. What still plays is stopped first."""
        self.fence.check(epoch, step)
        assert self.journal is not None
        await self._stop_playing()
        return await asyncio.to_thread(self.journal.seal)

    async def evaluate(self, epoch: int, step: int, order: GroupOrder, settings: PlaySettings) -> list[Score]:
        """Play samples of one held-out prompt; nothing goes to the journal."""
        self.fence.check(epoch, step)
        return await self._stoppable(self._evaluate(epoch, step, order, settings))

    async def _evaluate(self, epoch: int, step: int, order: GroupOrder, settings: PlaySettings) -> list[Score]:
        prompt = self.sources["heldout"][order.index]
        seed = self.config.run.seed
        samples = [
            Sample(key=TrajectoryKey(step, prompt.id, number), seed=derive_seed(seed, "evaluate", prompt.id, number))
            for number in order.samples
        ]
        async with self.slots:
            outcomes = await self.player.play_group(
                prompt,
                samples,
                derive_seed(seed, "environment", prompt.id),
                self._engine(epoch, step, order.engine),
                Unrecorded(),
                settings,
            )
        return [_score(outcome) for outcome in outcomes]

    async def make_canary(self, epoch: int, step: int, settings: PlaySettings) -> TrajectoryRef:
        """Record the base model's greedy reply to the first training prompt: the sequence that proves adapters.

        Engines and ranks compute it once per step, so its images are small.
        """
        self.fence.check(epoch, step)
        assert self.journal is not None
        prompt = shrunk(await self.ahead.take(0), _CANARY_IMAGE_PIXELS)
        patches = 0

        def on_end(_: Trajectory | EpisodeFailure, image_patches: int) -> None:
            nonlocal patches
            patches = image_patches

        outcomes = await self.player.play_group(
            prompt,
            [Sample(key=TrajectoryKey(step, prompt.id, 0), seed=0)],
            derive_seed(self.config.run.seed, "environment", prompt.id),
            self._engine(epoch, step, 0),
            self.journal,
            replace(settings, max_turns=1),
            on_end,
        )
        if isinstance(outcomes[0], EpisodeFailure):
            failure = outcomes[0]
            raise WorkerError(
                f"the first training prompt cannot be played: {failure.kind} {failure.source}: {failure.message}",
                "argusrl environment check RECIPE plays episodes without training",
            )
        return self.journal.finished(outcomes[0], image_patches=patches)

    def _engine(self, epoch: int, step: int, home: int) -> _Engine:
        assert self.links is not None
        return _Engine(self.links, epoch, step, home)

    async def _stoppable(self, play: Coroutine[Any, Any, T]) -> T:
        """Play in a task that `_stop_playing` may end: cancelling a call on the driver's side does not reach here."""
        task = asyncio.create_task(play)
        self.playing.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            raise WorkerError("stopped by the driver") from None
        finally:
            self.playing.discard(task)

    async def _stop_playing(self) -> None:
        playing = list(self.playing)
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        self.begun.clear()

    async def close(self) -> None:
        """End environments and rewards."""
        await self._stop_playing()
        await self.rewards.close()
        await self.sessions.close()


def open_good_rows(config: Config, split: Any, bad: Sequence[int]) -> PromptSource:
    """The prompts of a split without the rows that the check at start found unusable."""
    source = open_source(config.data, config.environment, split)
    if not bad:
        return source
    left_out = set(bad)
    return SelectedSource(source, [row for row in range(len(source)) if row not in left_out])


def _score(outcome: Trajectory | EpisodeFailure) -> Score:
    if isinstance(outcome, EpisodeFailure):
        reason = f"{outcome.kind} {outcome.source}: {outcome.message}"
        return Score(prompt_id=outcome.key.prompt_id, sample=outcome.key.sample, reward=0.0, text="", failed=reason)
    text = outcome.text[-1] if outcome.text else ""
    return Score(prompt_id=outcome.key.prompt_id, sample=outcome.key.sample, reward=outcome.reward, text=text)


class _GroupCommit:
    """One fsync serves everyone who waited for it: callers join the next one instead of queueing their own."""

    def __init__(self) -> None:
        self.next: asyncio.Task[None] | None = None
        self.running: asyncio.Task[None] | None = None

    async def __call__(self, journal: EpisodeJournal) -> None:
        """Returns when everything appended before the call is durable. Raises StorageError."""
        if self.next is None:
            self.next = asyncio.create_task(self._sync(journal, self.running))
        await asyncio.shield(self.next)

    async def _sync(self, journal: EpisodeJournal, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await asyncio.wait([previous])
        self.running, self.next = self.next, None
        await asyncio.to_thread(journal.sync)
