"""Plays the episodes of one group: environment × engine → trajectories, rewards included.

A bad rollout is data: whatever fails costs its own episode, and comes back as an EpisodeFailure with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from argusrl.environments.base import EnvironmentFailed, EnvironmentSession, StepResult
from argusrl.errors import DeadlineError, EngineError
from argusrl.journal.records import Partial
from argusrl.rewards.base import RewardFailed, Scorable
from argusrl.rollout.engine import Completion
from argusrl.rollout.group_sampler import EngineClient, GroupSampler, Place, Reply
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
    Unfinished,
)


class Scorer(Protocol):
    async def score(self, item: Scorable) -> tuple[float, dict[str, float]]:
        """(weighted sum, score by name). Raises RewardFailed."""
        ...


class Recorder(Protocol):
    """Where the parts of running episodes go before they finish."""

    def image(self, image: Image) -> ImageRef: ...

    def turn(self, key: TrajectoryKey, index: int, turn: Turn) -> None:
        """Turn `index` is complete. Earlier records of it, and of later ones, are of a try that was given up."""
        ...

    def partial(self, record: Partial) -> None:
        """A span of a reply that is still being sampled; offset 0 begins it anew."""
        ...


class Unrecorded:
    """Evaluation keeps nothing but the outcome."""

    def image(self, image: Image) -> ImageRef:
        return ImageRef(sha256=image.sha256, segment="", offset=0, length=0, width=image.width, height=image.height)

    def turn(self, key: TrajectoryKey, index: int, turn: Turn) -> None:
        pass

    def partial(self, record: Partial) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory to play."""

    key: TrajectoryKey
    seed: int  # of the sampling noise
    unfinished: Unfinished | None = None  # how far an interrupted run had come with it


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
    partial_seconds: float = 1.0  # between two records of a reply that is being sampled


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
        on_restart: Callable[[TrajectoryKey, str], None] | None = None,
    ) -> list[Trajectory | EpisodeFailure]:
        """One outcome per sample, in order. `on_end` hears of each the moment it is there, with its vision patches.

        An unfinished sample goes on where it was interrupted. Where its environment does not come back to the same
        place it starts whole, and `on_restart` hears why.
        """
        sampler = GroupSampler(engine, temperature=settings.temperature, adapter_version=settings.adapter_version)
        renderings: dict[tuple[Message, ...], Rendered] = {}

        async def one(sample: Sample) -> Trajectory | EpisodeFailure:
            episode = _Episode(self, prompt, sample, environment_seed, sampler, recorder, settings, renderings)
            outcome = await episode.play_with_retries(on_restart)
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


class _Diverged(Exception):
    """A replayed environment is not where it was."""


@dataclass(slots=True)
class _Course:
    """What one try of an episode has so far."""

    place: Place = field(default_factory=Place)
    turns: list[Turn] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    paid: float = 0.0
    question: str = ""


class _Episode:
    """One episode, played again from its start when something outside the user's code failed."""

    def __init__(
        self,
        player: EpisodePlayer,
        prompt: Prompt,
        sample: Sample,
        environment_seed: int,
        sampler: GroupSampler,
        recorder: Recorder,
        settings: PlaySettings,
        renderings: dict[tuple[Message, ...], Rendered],
    ) -> None:
        self.player, self.prompt, self.sample, self.environment_seed = player, prompt, sample, environment_seed
        self.sampler, self.recorder, self.settings, self.renderings = sampler, recorder, settings, renderings
        self.image_patches = 0  # before merging, of all turns
        self.failures = 0
        self.known = sample.unfinished  # until the try that goes on from there has reached it

    async def play_with_retries(
        self, on_restart: Callable[[TrajectoryKey, str], None] | None
    ) -> Trajectory | EpisodeFailure:
        """Infrastructure is tried again `retries` times with the same seed; the user's own code gets one more try.

        What is not the episode's own fault (storage, fencing) is raised: trying on would only hide it.
        """
        own_failures = infrastructure_failures = 0
        while True:
            outcome = await self._try()
            if isinstance(outcome, Trajectory):
                return outcome
            if self.known is not None:  # what is journalled leads nowhere; that takes no try away
                self.known = None
                if on_restart is not None:
                    on_restart(self.sample.key, outcome.message)
                continue
            self.failures += 1
            own_failures += not outcome.infrastructure
            infrastructure_failures += outcome.infrastructure
            if outcome.kind == "refused" or own_failures == 2 or infrastructure_failures > self.settings.retries:
                return outcome

    async def _try(self) -> Trajectory | EpisodeFailure:
        try:
            async with asyncio.timeout(self.settings.episode_timeout_seconds):
                return await self._play()
        except _Diverged as error:
            return self._failure("environment", "replay", str(error), infrastructure=True)
        except RenderingRefused as error:
            return self._failure("refused", "prompt", str(error), infrastructure=False)
        except EnvironmentFailed as error:
            return self._failure("environment", error.source, error.message, error.infrastructure)
        except RewardFailed as error:
            return self._failure("reward", error.source, error.message, error.infrastructure)
        except TimeoutError:
            limit_seconds = self.settings.episode_timeout_seconds
            message = f"ran past environment.episode_timeout_seconds = {limit_seconds:g}"
            return self._failure("timeout", "episode", message, infrastructure=True)
        except DeadlineError as error:
            return self._failure("timeout", "engine", str(error), infrastructure=True)
        except EngineError as error:
            return self._failure("request", "engine", str(error), infrastructure=True)

    def _failure(self, kind: str, source: str, message: str, infrastructure: bool) -> EpisodeFailure:
        return EpisodeFailure(
            key=self.sample.key, kind=kind, source=source, message=message, infrastructure=infrastructure
        )

    async def _play(self) -> Trajectory:
        started = time.monotonic()
        session = self.player.new_session()
        course = _Course()
        try:
            end = await self._turns(session, course)
        finally:
            with contextlib.suppress(EnvironmentFailed):  # must not cost a played episode, nor swallow a cancellation
                await session.close()
        if self.known is not None and (len(course.turns) < len(self.known.turns) or self.known.ids):
            raise _Diverged(f"the episode ended after {len(course.turns)} turns, it had gone on before")
        self.known = None
        item = Scorable(
            reply=course.texts[-1] if course.texts else "",
            replies=tuple(course.texts),
            prompt=course.question,
            answer=self.prompt.answer,
            info=self.prompt.info,
            environment_reward=course.paid,
            terminated=end is EpisodeEnd.TERMINATED,
        )
        reward, rewards = await self.player.scorer.score(item)
        return Trajectory(
            key=self.sample.key,
            turns=tuple(course.turns),
            reward=reward,
            rewards=rewards,
            end=end,
            seed=self.sample.seed,
            text=tuple(course.texts),
            answer=self.prompt.answer,
            info={**self.prompt.info, "prompt": course.question, "environment_reward": course.paid},
            seconds=time.monotonic() - started,
        )

    async def _turns(self, session: EnvironmentSession, course: _Course) -> EpisodeEnd:
        self.image_patches = 0
        messages = await session.reset(self.prompt, self.environment_seed)
        course.question = _text(messages)
        while True:
            rendered = self._render(messages, course.turns)
            course.place = course.place.showing(rendered)
            length = len(course.place.expanded_ids)
            if not course.turns and length > self.settings.max_prompt_tokens:
                limit = self.settings.max_prompt_tokens
                raise RenderingRefused(f"the prompt has {length} tokens, rollout.max_prompt_tokens is {limit}")
            if length >= self.settings.max_tokens:
                return EpisodeEnd.TRUNCATED
            self.image_patches += rendered.image_patches
            known = self._known_turn(rendered, len(course.turns))
            completion = _completion(known) if known else await self._sample(course.place, len(course.turns))
            text = self.player.renderer.decode(completion.response_ids)
            result = await session.step(text)
            if known and known.action != result.action:
                raise _Diverged(f"turn {len(course.turns)} was understood as {result.action!r}, not {known.action!r}")
            turn = self._turn(rendered, completion, result)
            self.recorder.turn(self.sample.key, len(course.turns), turn)
            course.turns.append(turn)
            course.texts.append(text)
            course.paid += result.reward
            course.place = course.place.after(completion.response_ids)
            if result.terminated:
                # A single reply that hit the token limit is over, but the limit ended it, not the model.
                cut = completion.stop is not StopReason.STOP and self.settings.max_turns == 1
                return EpisodeEnd.TRUNCATED if cut else EpisodeEnd.TERMINATED
            if result.truncated or len(course.turns) >= self.settings.max_turns:
                return EpisodeEnd.TRUNCATED
            messages = result.messages

    def _known_turn(self, rendered: Rendered, index: int) -> Turn | None:
        """The journalled turn at this place; None where the journal ends."""
        if self.known is None or index >= len(self.known.turns):
            return None
        turn = self.known.turns[index]
        if [image.sha256 for image in rendered.images] != [image.sha256 for image in turn.images]:
            raise _Diverged(f"the environment shows other images before turn {index}")
        if (rendered.collapsed_ids, rendered.expanded_ids) != (turn.collapsed_ids, turn.prompt_ids):
            raise _Diverged(f"the messages before turn {index} are others")
        return turn

    async def _sample(self, place: Place, index: int) -> Completion:
        """The reply of turn `index`, from where an interrupted run left it, if one did."""
        begun, self.known = self._begun(place), None
        reply = Reply(begun.ids, begun.logprobs)
        recorded = self._record(place, index, reply, 0)
        limit = min(self.settings.max_response_tokens, self.settings.max_tokens - len(place.expanded_ids))
        if begun.ids and begun.ids[-1] in self.player.renderer.end_ids:
            return Completion(response_ids=begun.ids, logprobs=begun.logprobs, stop=StopReason.STOP)
        if len(begun.ids) >= limit:
            return Completion(response_ids=begun.ids, logprobs=begun.logprobs, stop=StopReason.LENGTH)
        name = f"{self.sample.key.step}/{self.sample.key.prompt_id}/{index}"
        alone = bool(begun.ids) or self.failures > 0
        rest = place.after(begun.ids)
        self.sampler.start(name, rest, self.sample.seed, reply, limit - len(begun.ids), alone=alone)
        limit_seconds = self.settings.request_timeout_seconds
        try:
            async with asyncio.timeout(limit_seconds):
                while not (await asyncio.wait([reply.ended], timeout=self.settings.partial_seconds))[0]:
                    recorded = self._record(place, index, reply, recorded)
        except TimeoutError:
            raise DeadlineError(
                f"request {name} ran past rollout.request_timeout_seconds = {limit_seconds:g}"
            ) from None
        except BaseException:  # cancelled: what came since the last record is not sampled again
            self._record(place, index, reply, recorded)
            raise
        finally:
            reply.ended.cancel()
        return reply.completion()

    def _begun(self, place: Place) -> Unfinished:
        """The open reply of an interrupted run; without tokens if there is none."""
        known = self.known
        if known is None or not known.ids:
            return Unfinished(turns=())
        if known.place not in ("", place.digest()):
            raise _Diverged("the open reply followed other messages")
        return known

    def _record(self, place: Place, index: int, reply: Reply, recorded: int) -> int:
        """Keep the tokens after the first `recorded` ones; how many are kept then."""
        if len(reply.ids) > recorded:
            span = Partial(
                key=self.sample.key,
                turn=index,
                offset=recorded,
                ids=tuple(reply.ids[recorded:]),
                logprobs=tuple(reply.logprobs[recorded:]),
                adapter_version=self._adapter_version,
                adapter_sha256=self.settings.adapter_sha256,
                place=place.digest(),
            )
            self.recorder.partial(span)
        return len(reply.ids)

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
            adapter_version=self._adapter_version,
            adapter_sha256=self.settings.adapter_sha256,
            stop=completion.stop,
            action=result.action,
        )

    @property
    def _adapter_version(self) -> int:
        return -1 if self.settings.adapter_version is None else self.settings.adapter_version


def _completion(turn: Turn) -> Completion:
    return Completion(response_ids=turn.response_ids, logprobs=turn.logprobs, stop=turn.stop)


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(part for message in messages for part in message.content if isinstance(part, str))
