"""What an episode player talks to, as fakes: a renderer of single characters, engines, sessions, scorers, recorders."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import AsyncIterator, Callable, Sequence

from argusrl.environments.base import StepResult
from argusrl.journal.records import Partial
from argusrl.rewards.base import Scorable
from argusrl.rollout.engine import Completion, SampleRequest, Span
from argusrl.rollout.rendering import Rendered
from argusrl.types import Image, ImageRef, Message, Prompt, StopReason, TrajectoryKey, Turn

IMAGE, END = 1, 2
TOKENS_PER_IMAGE = 3


class CharacterRenderer:
    """One token per character; an image is one placeholder, three tokens when expanded."""

    end_ids = (END,)

    def first(self, messages: Sequence[Message]) -> Rendered:
        return self._render(messages, "")

    def following(self, messages: Sequence[Message], *, ended: bool) -> Rendered:
        return self._render(messages, "\n" if ended else "$\n")

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token not in (IMAGE, END))

    def _render(self, messages: Sequence[Message], start: str) -> Rendered:
        collapsed, expanded = [*map(ord, start)], [*map(ord, start)]
        for message in messages:
            for part in message.content:
                ids = [IMAGE] if isinstance(part, Image) else [*map(ord, part)]
                collapsed += ids
                expanded += ids * TOKENS_PER_IMAGE if isinstance(part, Image) else ids
        images = tuple(image for message in messages for image in message.images)
        return Rendered(
            collapsed_ids=tuple(collapsed), expanded_ids=tuple(expanded), images=images, image_patches=4 * len(images)
        )


class ScriptedEngine:
    """Answers request `n` (from 0), seed by seed, with `answer(n, request, seed)`; an exception is raised."""

    def __init__(self, answer: Callable[[int, SampleRequest, int], Completion | Exception]) -> None:
        self.answer = answer
        self.requests: list[SampleRequest] = []
        self.cancelled = 0

    async def sample(self, request: SampleRequest) -> AsyncIterator[Span]:
        number = len(self.requests)
        self.requests.append(request)
        for index, seed in enumerate(request.seeds):
            try:
                await asyncio.sleep(0)
                answer = self.answer(number, request, seed)
                if answer is HANG:
                    await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            if isinstance(answer, Exception):
                raise answer
            yield Span(index=index, ids=answer.response_ids, logprobs=answer.logprobs, stop=answer.stop)


HANG = Completion(response_ids=(), logprobs=(), stop=StopReason.ABORTED)


class NoiseEngine:
    """Draws each token from (seed, tokens before it), one per seed and `seconds`, as the real engine's noise does."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.requests: list[SampleRequest] = []

    async def sample(self, request: SampleRequest) -> AsyncIterator[Span]:
        self.requests.append(request)
        left = set(range(len(request.seeds)))
        for number in range(request.max_tokens):
            await asyncio.sleep(self.seconds)
            for index in sorted(left):
                draw = random.Random(f"{request.seeds[index]} {len(request.expanded_ids) + number}")
                token = END if draw.random() < 0.1 else ord(draw.choice("abcd"))
                stop = StopReason.LENGTH if number == request.max_tokens - 1 else None
                if token == END:
                    stop = StopReason.STOP
                if stop is not None:
                    left.remove(index)
                yield Span(index=index, ids=(token,), logprobs=(-draw.random(),), stop=stop)
            if not left:
                return


class _ImpatientSelector(selectors.SelectSelector):
    """Lets the clock jump instead of waiting."""

    loop: ImpatientLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.loop.now += timeout or 0.0
        return super().select(None if timeout is None else 0)


class ImpatientLoop(asyncio.SelectorEventLoop):
    """An event loop in which sleeping takes no time, and the same happens every time. For code without threads."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _ImpatientSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def reply(text: str, stop: StopReason = StopReason.STOP) -> Completion:
    ids = (*map(ord, text), END) if stop is StopReason.STOP else tuple(map(ord, text))
    return Completion(response_ids=ids, logprobs=(-0.5,) * len(ids), stop=stop)


class Walk:
    """An environment of `length` steps that shows a picture each time; `fail` may raise in step or reset."""

    closed = 0

    def __init__(self, length: int, fail: Callable[[str, int], None] = lambda verb, step: None) -> None:
        self.length, self.fail = length, fail
        self.steps = 0

    async def reset(self, prompt: Prompt, seed: int) -> tuple[Message, ...]:
        self.fail("reset", 0)
        self.steps = 0
        return (picture(0, "go"),)

    async def step(self, reply: str) -> StepResult:
        self.steps += 1
        self.fail("step", self.steps)
        done = self.steps == self.length
        return StepResult(
            messages=() if done else (picture(self.steps),),
            reward=float(done),
            terminated=done,
            truncated=False,
            action=reply,
        )

    async def close(self) -> None:
        type(self).closed += 1


class Ask:
    """A single turn."""

    async def reset(self, prompt: Prompt, seed: int) -> tuple[Message, ...]:
        return prompt.messages

    async def step(self, reply: str) -> StepResult:
        return StepResult(messages=(), reward=0.0, terminated=True, truncated=False)

    async def close(self) -> None: ...


def picture(number: int, text: str = "") -> Message:
    image = Image(data=f"png{number}".encode(), width=8, height=8)
    return Message(role="user", content=(image, text) if text else (image,))


class LengthScorer:
    """Pays what the environment paid, or one for the reply "yes"."""

    def __init__(self, fail: Callable[[Scorable], None] = lambda item: None) -> None:
        self.fail = fail
        self.items: list[Scorable] = []

    async def score(self, item: Scorable) -> tuple[float, dict[str, float]]:
        self.items.append(item)
        self.fail(item)
        value = item.environment_reward + float(item.reply == "yes")
        return value, {"fake": value}


class Notes:
    """Records turns and images."""

    def __init__(self) -> None:
        self.turns: list[tuple[TrajectoryKey, int, Turn]] = []
        self.partials: list[tuple[TrajectoryKey, int, int, list[int]]] = []
        self.images: list[str] = []

    def image(self, image: Image) -> ImageRef:
        self.images.append(image.sha256)
        return ImageRef(sha256=image.sha256, segment="s", offset=0, length=1, width=image.width, height=image.height)

    def turn(self, key: TrajectoryKey, index: int, turn: Turn) -> None:
        self.turns.append((key, index, turn))

    def partial(self, record: Partial) -> None:
        assert len(record.ids) == len(record.logprobs) > 0
        self.partials.append((record.key, record.turn, record.offset, list(record.ids)))
