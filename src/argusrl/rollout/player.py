"""Plays the episodes of one group: environment × engine → trajectories, rewards included.

A bad rollout is data: whatever fails costs its own episode, and comes back as an EpisodeFailure with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from argusrl.environments.base import EnvironmentFailed, EnvironmentSession, StepResult
from argusrl.errors import DeadlineError, EngineError
from argusrl.rewards.base import RewardFailed, Scorable
from argusrl.rollout.engine import Completion, EngineImage, SampleRequest
from argusrl.rollout.rendering import Rendered, Renderer, RenderingRefused
from argusrl.types import (
    EpisodeEnd,
    EpisodeFailure,
    Image,
    ImageRef,
    Message,
    Prompt,
    StopReason,
    Trajectory,
    TrajectoryKey,
    Turn,
)


class EngineClient(Protocol):
    """An engine as the player sees it."""

    def sample(self, request: SampleRequest) -> AsyncIterator[tuple[int, Completion]]:
        """Yield (index of the seed, completion) as replies finish. Raises EngineError."""
        ...


class Scorer(Protocol):
    async def score(self, item: Scorable) -> tuple[float, dict[str, float]]:
        """(weighted sum, score by name). Raises RewardFailed."""
        ...


class Recorder(Protocol):
    """Where the parts of running episodes go before they finish."""

    def image(self, image: Image) -> ImageRef: ...

    def turn(self, key: TrajectoryKey, index: int, turn: Turn) -> None: ...


class Unrecorded:
    """Evaluation keeps nothing but the outcome."""

    def image(self, image: Image) -> ImageRef:
        return ImageRef(sha256=image.sha256, segment="", offset=0, length=0, width=image.width, height=image.height)

    def turn(self, key: TrajectoryKey, index: int, turn: Turn) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory to play."""

    key: TrajectoryKey
    seed: int  # of the sampling noise


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaySettings:
    """How all episodes of a phase are played."""

    temperature: float  # 0 is greedy
    max_response_tokens: int  # per turn
    max_prompt_tokens: int
    max_tokens: int  # of the whole sequence
    max_turns: int
    adapter_version: int | None
    adapter_sha256: str
    request_timeout_seconds: float
    episode_timeout_seconds: float
    retries: int


class EpisodePlayer:
    """Stateless between groups; one per episode worker."""

    def __init__(self, renderer: Renderer, new_session: Callable[[], EnvironmentSession], scorer: Scorer) -> None:
        self.renderer = renderer
        self.new_session = new_session
        self.scorer = scorer

    async def play_group(
        self,
        prompt: Prompt,
        samples: Sequence[Sample],
        environment_seed: int,
        engine: EngineClient,
        recorder: Recorder,
        settings: PlaySettings,
        on_end: Callable[[Trajectory | EpisodeFailure, int], None] | None = None,
    ) -> list[Trajectory | EpisodeFailure]:
        """One outcome per sample, in order. `on_end` hears of each the moment it is there, with its vision patches."""
        sampler = _GroupSampler(engine, settings)
        renderings: dict[tuple[Message, ...], Rendered] = {}

        async def one(sample: Sample) -> Trajectory | EpisodeFailure:
            episode = _Episode(self, prompt, sample, environment_seed, sampler, recorder, settings, renderings)
            outcome = await episode.play_with_retries()
            if on_end is not None:
                on_end(outcome, episode.image_patches)
            return outcome

        episodes = [asyncio.create_task(one(sample)) for sample in samples]
        try:
            return await asyncio.gather(*episodes)
        finally:  # cancelled, or a fault that is not an episode's own: nothing may go on behind the caller's back
            await _cancelled(episodes)
            await sampler.close()


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _cancel_once(task: asyncio.Task[Any]) -> None:
    """A second cancellation would cut short what the engine does about the first."""
    if not task.cancelling():
        task.cancel()


# Collapsed ids and image digests: the same place, the same request; and the seed of one that must go alone.
_Place = tuple[tuple[int, ...], tuple[str, ...], int | None]


class _GroupSampler:
    """Joins requests for the same tokens that siblings make in the same turn of the event loop into one request.

    The engine then processes prompt and images of a group once.
    """

    def __init__(self, engine: EngineClient, settings: PlaySettings) -> None:
        self.engine = engine
        self.settings = settings
        self.waiting: dict[_Place, list[tuple[int, asyncio.Future[Completion]]]] = {}
        self.running: set[asyncio.Task[None]] = set()
        self.sent = 0

    async def sample(
        self,
        request_id: str,
        collapsed: tuple[int, ...],
        expanded: tuple[int, ...],
        images: list[EngineImage],
        seed: int,
        *,
        alone: bool,
    ) -> Completion:
        """The reply to these tokens. `alone`: after a failure, so that it cannot take siblings along again."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        key = (collapsed, tuple(image.sha256 for image in images), seed if alone else None)
        if key not in self.waiting:
            self.waiting[key] = []
            limit = min(self.settings.max_response_tokens, self.settings.max_tokens - len(expanded))
            loop.call_soon(self._send, key, request_id, collapsed, expanded, tuple(images), limit)
        self.waiting[key].append((seed, future))
        limit_seconds = self.settings.request_timeout_seconds
        try:
            async with asyncio.timeout(limit_seconds):
                return await future
        except TimeoutError:
            raise DeadlineError(
                f"request {request_id} ran past rollout.request_timeout_seconds = {limit_seconds:g}"
            ) from None

    def _send(
        self,
        key: _Place,
        request_id: str,
        collapsed: tuple[int, ...],
        expanded: tuple[int, ...],
        images: tuple[EngineImage, ...],
        limit: int,
    ) -> None:
        waiting = self.waiting.pop(key)
        self.sent += 1
        request = SampleRequest(
            id=f"{request_id}/{self.sent}",
            collapsed_ids=collapsed,
            expanded_ids=expanded,
            images=images,
            seeds=tuple(seed for seed, _ in waiting),
            temperature=self.settings.temperature,
            max_tokens=limit,
            adapter_version=self.settings.adapter_version,
        )
        task = asyncio.get_running_loop().create_task(self._receive(request, [future for _, future in waiting]))
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        for _, future in waiting:
            future.add_done_callback(lambda _: self._abort_if_unwanted(task, waiting))

    @staticmethod
    def _abort_if_unwanted(task: asyncio.Task[None], waiting: list[tuple[int, asyncio.Future[Completion]]]) -> None:
        if all(future.cancelled() for _, future in waiting):
            _cancel_once(task)

    async def close(self) -> None:
        """Abort what still runs, and wait until the engine has let go of it."""
        running = list(self.running)
        for task in running:
            _cancel_once(task)
        await asyncio.gather(*running, return_exceptions=True)

    async def _receive(self, request: SampleRequest, futures: list[asyncio.Future[Completion]]) -> None:
        error: Exception = EngineError(f"request {request.id} ended without a reply for every seed")
        try:
            async for index, completion in self.engine.sample(request):
                if not futures[index].done():
                    futures[index].set_result(completion)
        except Exception as raised:
            error = raised
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # a sibling that timed out no longer looks


class _Episode:
    """One episode, played again from its start when something outside the user's code failed."""

    def __init__(
        self,
        player: EpisodePlayer,
        prompt: Prompt,
        sample: Sample,
        environment_seed: int,
        sampler: _GroupSampler,
        recorder: Recorder,
        settings: PlaySettings,
        renderings: dict[tuple[Message, ...], Rendered],
    ) -> None:
        self.player, self.prompt, self.sample, self.environment_seed = player, prompt, sample, environment_seed
        self.sampler, self.recorder, self.settings, self.renderings = sampler, recorder, settings, renderings
        self.image_patches = 0  # before merging, of all turns
        self.failures = 0

    async def play_with_retries(self) -> Trajectory | EpisodeFailure:
        """Infrastructure is tried again `retries` times with the same seed; the user's own code gets one more try.

        What is not the episode's own fault (storage, fencing) is raised: trying on would only hide it.
        """
        failure = None
        own_failures = infrastructure_failures = 0
        while own_failures < 2 and infrastructure_failures <= self.settings.retries:
            try:
                async with asyncio.timeout(self.settings.episode_timeout_seconds):
                    return await self._play()
            except RenderingRefused as error:
                return self._failure("refused", "prompt", str(error), infrastructure=False)
            except EnvironmentFailed as error:
                failure = self._failure("environment", error.source, error.message, error.infrastructure)
            except RewardFailed as error:
                failure = self._failure("reward", error.source, error.message, error.infrastructure)
            except TimeoutError:
                limit_seconds = self.settings.episode_timeout_seconds
                message = f"ran past environment.episode_timeout_seconds = {limit_seconds:g}"
                failure = self._failure("timeout", "episode", message, infrastructure=True)
            except DeadlineError as error:
                failure = self._failure("timeout", "engine", str(error), infrastructure=True)
            except EngineError as error:
                failure = self._failure("request", "engine", str(error), infrastructure=True)
            self.failures += 1
            own_failures += not failure.infrastructure
            infrastructure_failures += failure.infrastructure
        assert failure is not None
        return failure

    def _failure(self, kind: str, source: str, message: str, infrastructure: bool) -> EpisodeFailure:
        return EpisodeFailure(
            key=self.sample.key, kind=kind, source=source, message=message, infrastructure=infrastructure
        )

    async def _play(self) -> Trajectory:
        started = time.monotonic()
        session = self.player.new_session()
        try:
            turns, texts, paid, end, question = await self._turns(session)
        finally:
            with contextlib.suppress(EnvironmentFailed):  # must not cost a played episode, nor swallow a cancellation
                await session.close()
        item = Scorable(
            reply=texts[-1] if texts else "",
            replies=tuple(texts),
            prompt=question,
            answer=self.prompt.answer,
            info=self.prompt.info,
            environment_reward=paid,
            terminated=end is EpisodeEnd.TERMINATED,
        )
        reward, rewards = await self.player.scorer.score(item)
        return Trajectory(
            key=self.sample.key,
            turns=tuple(turns),
            reward=reward,
            rewards=rewards,
            end=end,
            seed=self.sample.seed,
            text=tuple(texts),
            answer=self.prompt.answer,
            info={**self.prompt.info, "prompt": question, "environment_reward": paid},
            seconds=time.monotonic() - started,
        )

    async def _turns(self, session: EnvironmentSession) -> tuple[list[Turn], list[str], float, EpisodeEnd, str]:
        turns: list[Turn] = []
        texts: list[str] = []
        paid = 0.0
        collapsed: tuple[int, ...] = ()
        expanded: tuple[int, ...] = ()
        images: list[EngineImage] = []
        self.image_patches = 0
        messages = await session.reset(self.prompt, self.environment_seed)
        question = _text(messages)
        while True:
            rendered = self._render(messages, turns)
            collapsed += rendered.collapsed_ids
            expanded += rendered.expanded_ids
            if not turns and len(expanded) > self.settings.max_prompt_tokens:
                limit = self.settings.max_prompt_tokens
                raise RenderingRefused(f"the prompt has {len(expanded)} tokens, rollout.max_prompt_tokens is {limit}")
            if len(expanded) >= self.settings.max_tokens:
                return turns, texts, paid, EpisodeEnd.TRUNCATED, question
            self.image_patches += rendered.image_patches
            images += [EngineImage(sha256=image.sha256, data=image.data) for image in rendered.images]
            name = f"{self.sample.key.step}/{self.sample.key.prompt_id}/{len(turns)}"
            completion = await self.sampler.sample(
                name, collapsed, expanded, images, self.sample.seed, alone=self.failures > 0
            )
            text = self.player.renderer.decode(completion.response_ids)
            result = await session.step(text)
            turn = self._turn(rendered, completion, result)
            self.recorder.turn(self.sample.key, len(turns), turn)
            turns.append(turn)
            texts.append(text)
            paid += result.reward
            collapsed += completion.response_ids
            expanded += completion.response_ids
            cut = completion.stop is not StopReason.STOP
            if result.terminated:
                # A single reply that hit the token limit is over, but the limit ended it, not the model.
                single = self.settings.max_turns == 1
                return turns, texts, paid, EpisodeEnd.TRUNCATED if cut and single else EpisodeEnd.TERMINATED, question
            if result.truncated or len(turns) >= self.settings.max_turns:
                return turns, texts, paid, EpisodeEnd.TRUNCATED, question
            messages = result.messages

    def _render(self, messages: Sequence[Message], turns: list[Turn]) -> Rendered:
        """Siblings start from the same messages, so the first rendering is shared by the group."""
        if turns:
            return self.player.renderer.following(messages, ended=turns[-1].stop is StopReason.STOP)
        key = tuple(messages)
        if key not in self.renderings:
            self.renderings[key] = self.player.renderer.first(messages)
        return self.renderings[key]

    def _turn(self, rendered: Rendered, completion: Completion, result: StepResult) -> Turn:
        return Turn(
            prompt_ids=rendered.expanded_ids,
            collapsed_ids=rendered.collapsed_ids,
            response_ids=completion.response_ids,
            logprobs=completion.logprobs,
            images=tuple(self.recorder.image(image) for image in rendered.images),
            adapter_version=-1 if self.settings.adapter_version is None else self.settings.adapter_version,
            adapter_sha256=self.settings.adapter_sha256,
            stop=completion.stop,
            action=result.action,
        )


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(part for message in messages for part in message.content if isinstance(part, str))
