from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from argusrl.errors import EngineError
from argusrl.rollout.sequences import Batch, Piece, RunningSequence, hand_over

FINAL = object()


class State:
    """vLLM's lists of one sequence, growing."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.detokenizer = SimpleNamespace(output_token_ids=self.ids, num_output_tokens=lambda: len(self.ids))
        self.logprobs_processor = SimpleNamespace(logprobs=SimpleNamespace(token_ids=[], logprobs=[]))

    def grow(self, *ids: int) -> None:
        self.ids += ids
        table: Any = self.logprobs_processor.logprobs
        table.token_ids += ids
        table.logprobs += [-float(token) for token in ids]


def test_pieces_follow_each_other_and_the_last_one_may_be_empty():
    async def work() -> None:
        state = State()
        sequence = RunningSequence(Batch(1), 5, state, None)
        assert sequence.take() is None
        state.grow(1, 2)
        assert sequence.take() == Piece(5, (1, 2), (-1.0, -2.0), None)
        assert sequence.take() is None
        state.grow(3)
        assert sequence.take() == Piece(5, (3,), (-3.0,), None)
        assert sequence.take(FINAL) == Piece(5, (), (), FINAL)
        assert sequence.tokens == 3

    asyncio.run(work())


def test_log_probabilities_of_other_tokens_are_not_taken():
    async def work() -> None:
        state = State()
        state.grow(1, 2)
        state.ids[1] = 9
        with pytest.raises(EngineError, match="do not belong"):
            RunningSequence(Batch(1), 0, state, None).take()

    asyncio.run(work())


def test_a_batch_has_ended_when_each_of_its_sequences_has():
    async def work() -> None:
        batch = Batch(2)
        first = [Piece(0, (1,), (-1.0,), None), Piece(1, (2,), (-1.0,), FINAL)]
        thread = threading.Thread(target=lambda: hand_over({batch: first}))
        thread.start()
        assert await batch.receive() == first
        thread.join()
        assert not batch.ended
        hand_over({batch: [Piece(0, (), (), FINAL)]})
        await batch.receive()
        assert batch.ended

    asyncio.run(work())


def test_an_error_ends_the_call():
    async def work() -> None:
        batch = Batch(1)
        hand_over({batch: EngineError("out of memory")})
        with pytest.raises(EngineError, match="out of memory"):
            await batch.receive()

    asyncio.run(work())


def test_a_caller_whose_loop_is_gone_does_no_harm():
    async def work() -> Batch:
        return Batch(1)

    batch = asyncio.run(work())
    hand_over({batch: [Piece(0, (1,), (-1.0,), FINAL)]})
