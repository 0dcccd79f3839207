"""Requests of the episodes of one group: siblings at the same place share one, each follows its own reply."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from argusrl.errors import EngineError
from argusrl.rollout.engine import Completion, EngineImage, SampleRequest, Span
from argusrl.rollout.rendering import Rendered
from argusrl.types import StopReason


class EngineClient(Protocol):
    """An engine as the player sees it."""

    def sample(self, request: SampleRequest) -> AsyncIterator[Span]:
        """The replies as they grow (see the engine port). Raises EngineError."""
        ...


class Reply:
    """One reply while it is sampled. It may begin with tokens that an interrupted run left."""

    def __init__(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        self.ids = list(ids)
        self.logprobs = list(logprobs)
        self.ended: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()

    def take(self, span: Span) -> None:
        """Append the next tokens."""
        self.ids += span.ids
        self.logprobs += span.logprobs
        if span.stop is not None and not self.ended.done():
            self.ended.set_result(span.stop)

    def fail(self, error: Exception) -> None:
        """End without a reason to stop; nothing happens if it has ended."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # a sibling that timed out no longer looks

    def completion(self) -> Completion:
        """The whole reply, once it has ended. Raises what ended it."""
        return Completion(response_ids=tuple(self.ids), logprobs=tuple(self.logprobs), stop=self.ended.result())


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What comes before a reply."""

    collapsed_ids: tuple[int, ...] = ()
    expanded_ids: tuple[int, ...] = ()
    images: tuple[EngineImage, ...] = ()

    def showing(self, rendered: Rendered) -> Place:
        """The same with these messages after it."""
        images = (EngineImage(sha256=image.sha256, data=image.data) for image in rendered.images)
        return Place(
            collapsed_ids=self.collapsed_ids + rendered.collapsed_ids,
            expanded_ids=self.expanded_ids + rendered.expanded_ids,
            images=(*self.images, *images),
        )

    def after(self, ids: Sequence[int]) -> Place:
        """The same with these tokens of a reply after it."""
        more = tuple(ids)
        return Place(collapsed_ids=self.collapsed_ids + more, expanded_ids=self.expanded_ids + more, images=self.images)

    def digest(self) -> str:
        """Tells places apart: over all tokens and images."""
        seen = hashlib.blake2b(array("q", self.expanded_ids).tobytes(), digest_size=16)
        for image in self.images:
            seen.update(image.sha256.encode())
        return seen.hexdigest()


# Collapsed ids and image digests: the same place, the same request; and the seed of one that must go alone.
_Joint = tuple[tuple[int, ...], tuple[str, ...], int | None]


class GroupSampler:
    """Joins requests for the same tokens that siblings make in the same turn of the event loop into one request.

    The engine then processes prompt and images of a group once.
    """

    def __init__(self, engine: EngineClient, *, temperature: float, adapter_version: int | None) -> None:
        self.engine = engine
        self.temperature = temperature
        self.adapter_version = adapter_version
        self._waiting: dict[_Joint, list[tuple[int, Reply]]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._sent = 0

    def start(self, request_id: str, place: Place, seed: int, reply: Reply, max_tokens: int, *, alone: bool) -> None:
        """Let `reply` grow by at most `max_tokens` after `place`. Cancelling `reply.ended` gives it up.

        `alone`: of a reply that goes on in its middle, or after a failure, so that it cannot take siblings along.
        """
        joint = (place.collapsed_ids, tuple(image.sha256 for image in place.images), seed if alone else None)
        if joint not in self._waiting:
            self._waiting[joint] = []
            asyncio.get_running_loop().call_soon(self._send, joint, request_id, place, max_tokens)
        self._waiting[joint].append((seed, reply))

    async def close(self) -> None:
        """Abort what still runs, and wait until the engine has let go of it."""
        running = list(self._running)
        for task in running:
            _cancel_once(task)
        await asyncio.gather(*running, return_exceptions=True)

    def _send(self, joint: _Joint, request_id: str, place: Place, max_tokens: int) -> None:
        waiting = self._waiting.pop(joint)
        self._sent += 1
        request = SampleRequest(
            id=f"{request_id}/{self._sent}",
            collapsed_ids=place.collapsed_ids,
            expanded_ids=place.expanded_ids,
            images=place.images,
            seeds=tuple(seed for seed, _ in waiting),
            temperature=self.temperature,
            max_tokens=max_tokens,
            adapter_version=self.adapter_version,
        )
        replies = [reply for _, reply in waiting]
        task = asyncio.get_running_loop().create_task(self._receive(request, replies))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

        def abort_if_unwanted(_: asyncio.Future[StopReason]) -> None:
            ended = [reply.ended for reply in replies]
            if all(one.done() for one in ended) and any(one.cancelled() for one in ended):
                _cancel_once(task)

        for reply in replies:
            reply.ended.add_done_callback(abort_if_unwanted)

    async def _receive(self, request: SampleRequest, replies: list[Reply]) -> None:
        error: Exception = EngineError(f"request {request.id} ended without a reply for every seed")
        try:
            async for span in self.engine.sample(request):
                replies[span.index].take(span)
        except Exception as raised:
            error = raised
        for reply in replies:
            reply.fail(error)


def _cancel_once(task: asyncio.Task[None]) -> None:
    """A second cancellation would cut short what the engine does about the first."""
    if not task.cancelling():
        task.cancel()
