"""The sequences of one call to the engine, and the way of their tokens from the stepping thread to who asked."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from argusrl.errors import EngineError, WorkerError
from argusrl.rollout.engine import SampleRequest, Span
from argusrl.types import AdapterRef, StopReason

_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORTED}


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """One adapter version that was proven, and how many sequences run under it."""

    ref: AdapterRef
    request: Any  # vLLM's LoRARequest; None where the weights themselves are the version
    running: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one sequence since the piece before."""

    index: int  # of its seed
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    output: Any  # vLLM's RequestOutput, in the last piece alone


class Batch:
    """The sequences of one call. Made on the event loop of the caller, filled from the stepping thread."""

    def __init__(self, size: int) -> None:
        self.adapter: ServedAdapter | None = None
        self.engine_ids: list[str] = []  # vLLM's own, for aborting
        self._left = size
        self.loop = asyncio.get_running_loop()
        self.arrived: asyncio.Queue[Sequence[Piece] | WorkerError] = asyncio.Queue()

    @property
    def ended(self) -> bool:
        """Whether the last piece of every sequence was received."""
        return self._left == 0

    async def receive(self) -> Sequence[Piece]:
        """The next pieces. Raises what was pushed as an error."""
        news = await self.arrived.get()
        if isinstance(news, WorkerError):
            raise news
        self._left -= sum(piece.output is not None for piece in news)
        return news


def hand_over(news: Mapping[Batch, Sequence[Piece] | WorkerError]) -> None:
    """Pieces for calls, or the errors that end them. From any thread; wakes each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Batch]] = {}
    for batch in news:
        by_loop.setdefault(batch.loop, []).append(batch)
    for loop, batches in by_loop.items():
        with suppress(RuntimeError):  # the loop that asked is gone, and nobody waits
            loop.call_soon_threadsafe(_put, [(batch, news[batch]) for batch in batches])


def _put(items: Sequence[tuple[Batch, Sequence[Piece] | WorkerError]]) -> None:
    for batch, pieces in items:
        batch.arrived.put_nowait(pieces)


@dataclass(slots=True, eq=False)
class RunningSequence:
    """One seed of a batch inside the engine. vLLM's own growing lists are read in place: nothing is copied twice."""

    batch: Batch
    index: int
    state: Any  # vLLM's RequestState
    scheduled: Any  # vLLM's Request
    _sent: int = field(default=0)

    @property
    def tokens(self) -> int:
        """How many were sampled so far."""
        return int(self.state.detokenizer.num_output_tokens())

    def take(self, output: Any = None) -> Piece | None:
        """What is new; None if nothing is. With vLLM's final output there is always a piece."""
        if output is None and self.tokens == self._sent:
            return None
        ids = self.state.detokenizer.output_token_ids[self._sent :]
        table = self.state.logprobs_processor.logprobs  # flat: one row per token, of the sampled one alone
        if table.token_ids[self._sent :] != ids:
            raise EngineError("vLLM's log-probabilities do not belong to the tokens that it sampled")
        piece = Piece(self.index, tuple(ids), tuple(table.logprobs[self._sent :]), output)
        self._sent += len(ids)
        return piece


def span_of(request: SampleRequest, piece: Piece) -> Span:
    """A piece as the port says it. Raises EngineError for log-probabilities that are no numbers."""
    if not all(map(math.isfinite, piece.logprobs)):
        raise EngineError(
            f"request {request.id}: the model gave a sampled token a log-probability that is no number",
            "weights or activations overflowed; compare model.dtype with what the model was trained in",
        )
    stop = None
    if piece.output is not None:
        reason = piece.output.outputs[0].finish_reason
        stop = _STOP_REASONS.get(reason)
        if stop is None:
            raise EngineError(f"vLLM ended request {request.id} with {reason!r}")
    return Span(index=piece.index, ids=piece.ids, logprobs=piece.logprobs, stop=stop)
