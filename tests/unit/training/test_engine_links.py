"""Replies that survive the engine that began them, with engines whose tokens are a function of seed and position."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from argusrl.errors import EngineError, WorkerLost
from argusrl.rollout.engine import SampleRequest, Span
from argusrl.training.engine_links import EngineLinks
from argusrl.training.engine_worker import Delivery
from argusrl.types import StopReason

PROMPT = (7, 8, 9)
LENGTH = 12


def token(seed: int, position: int) -> int:
    return (seed * 31 + position * 17) % 97


def whole(seed: int) -> list[int]:
    return [token(seed, position) for position in range(LENGTH)]


class Remote:
    """`actor.method.remote(...)` as Ray has it."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def remote(self, *arguments: Any) -> Any:
        return self.call(*arguments)


class FakeEngineActor:
    """Samples two tokens of every request per collection, until it dies."""

    def __init__(self, dies_after: int | None = None, refuses: bool = False, stalls: bool = False) -> None:
        self.dies_after, self.refuses, self.stalls = dies_after, refuses, stalls
        self.collections = 0
        self.requests: dict[str, tuple[SampleRequest, list[int]]] = {}
        self.seen: list[SampleRequest] = []
        self.aborted: list[str] = []
        self.outbox: deque[Delivery] = deque()
        self.first = 0
        self.submit, self.collect, self.abort = Remote(self._submit), Remote(self._collect), Remote(self._abort)

    async def _submit(self, epoch: int, step: int, client: str, request: SampleRequest) -> None:
        if self.dies_after == 0:
            raise ActorDiedError()
        if self.refuses:
            cause = EngineError("too long")
            raise RayTaskError("submit", "Traceback: …", cause).as_instanceof_cause()
        self.seen.append(request)
        self.requests[request.id] = (request, [0] * len(request.seeds))

    async def _collect(self, epoch: int, client: str, confirmed: int) -> tuple[int, list[Delivery]]:
        await asyncio.sleep(0)
        self.collections += 1
        if self.dies_after is not None and self.collections > self.dies_after:
            raise ActorDiedError()
        while self.first < confirmed:
            self.outbox.popleft()
            self.first += 1
        if self.stalls:
            await asyncio.sleep(3600)
        for name, (request, done) in list(self.requests.items()):
            for index, seed in enumerate(request.seeds):
                start = len(request.collapsed_ids) - len(PROMPT) + done[index]
                ids = [token(seed, position) for position in range(start, min(start + 2, LENGTH))]
                if not ids:
                    continue
                done[index] += len(ids)
                stop = StopReason.STOP if start + len(ids) == LENGTH else None
                span = Span(index=index, ids=tuple(ids), logprobs=tuple(-1.0 for _ in ids), stop=stop)
                self.outbox.append(Delivery(request_id=name, span=span))
        return self.first, list(self.outbox)

    async def _abort(self, epoch: int, names: list[str]) -> None:
        self.aborted += names


def request(*seeds: int) -> SampleRequest:
    return SampleRequest(
        id="1/a/0",
        collapsed_ids=PROMPT,
        expanded_ids=PROMPT,
        images=(),
        seeds=seeds,
        temperature=1.0,
        max_tokens=LENGTH,
        adapter_version=0,
    )


async def replies(links: EngineLinks, asked: SampleRequest, home: int = 0) -> list[list[int]]:
    got: list[list[int]] = [[] for _ in asked.seeds]
    async for span in links.sample(1, 1, home, asked):
        got[span.index] += span.ids
    return got


def test_a_reply_arrives_whole_from_one_engine():
    async def play():
        links = EngineLinks("w0")
        links.set({0: FakeEngineActor()})
        return await replies(links, request(1, 2, 3))

    assert asyncio.run(play()) == [whole(1), whole(2), whole(3)]


@pytest.mark.parametrize("after", range(LENGTH // 2 + 2))
def test_a_reply_goes_on_elsewhere_from_the_tokens_it_has(after):
    async def play():
        links = EngineLinks("w0")
        dying, other = FakeEngineActor(dies_after=after), FakeEngineActor()
        links.set({0: dying, 1: other})
        return await replies(links, request(1, 2)), other.seen, links.continued_tokens

    got, asked, continued = asyncio.run(play())
    assert got == [whole(1), whole(2)]
    if after == 0:
        assert [one.seeds for one in asked] == [(1, 2)]  # nothing had arrived: they stay one request
        assert continued == 0
    elif after < LENGTH // 2:
        assert sorted(one.seeds for one in asked) == [(1,), (2,)]
        for one in asked:  # not one token is sampled twice
            assert one.collapsed_ids == PROMPT + tuple(whole(one.seeds[0])[: 2 * after])
            assert one.max_tokens == LENGTH - 2 * after
        assert continued == 2 * 2 * after


def test_with_no_engine_left_a_reply_waits_for_the_replacement():
    async def play():
        links = EngineLinks("w0")
        links.set({0: FakeEngineActor(dies_after=2)})
        waiting = asyncio.create_task(replies(links, request(5)))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        links.set({})
        links.set({0: FakeEngineActor()})
        return await waiting

    assert asyncio.run(play()) == [whole(5)]


def test_an_engine_that_hangs_is_left_when_it_is_replaced():
    async def play():
        links = EngineLinks("w0")
        links.set({0: FakeEngineActor(stalls=True)})
        waiting = asyncio.create_task(replies(links, request(5)))
        await asyncio.sleep(0.01)
        links.set({0: FakeEngineActor()})
        return await waiting

    assert asyncio.run(play()) == [whole(5)]


def test_a_fault_of_the_request_is_not_one_of_the_engine():
    async def play():
        links = EngineLinks("w0")
        other = FakeEngineActor()
        links.set({0: FakeEngineActor(refuses=True), 1: other})
        with pytest.raises(EngineError, match="too long"):
            await replies(links, request(1))
        return other.seen

    assert asyncio.run(play()) == []


def test_an_engine_that_broke_inside_its_process_is_lost_as_well():
    class Broken(FakeEngineActor):
        async def _collect(self, epoch, client, confirmed):
            await asyncio.sleep(0)
            (name,) = self.requests
            return 0, [Delivery(request_id=name, error=WorkerLost("the engine failed in a step"))]

    async def play():
        links = EngineLinks("w0")
        links.set({0: Broken(), 1: FakeEngineActor()})
        return await replies(links, request(3))

    assert asyncio.run(play()) == [whole(3)]


def test_who_stops_listening_aborts_in_the_engine():
    async def play():
        links = EngineLinks("w0")
        actor = FakeEngineActor(stalls=True)
        links.set({0: actor})
        task = asyncio.create_task(replies(links, request(1)))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return actor

    actor = asyncio.run(play())
    assert actor.aborted == [actor.seen[0].id]


def test_the_same_turn_may_be_asked_for_twice_at_a_time():
    async def play():
        links = EngineLinks("w0")
        actor = FakeEngineActor()
        links.set({0: actor})
        both = await asyncio.gather(replies(links, request(1)), replies(links, request(2)))
        return both, {one.id for one in actor.seen}

    both, names = asyncio.run(play())
    assert both == [[whole(1)], [whole(2)]]
    assert len(names) == 2
