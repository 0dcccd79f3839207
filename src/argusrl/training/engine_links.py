"""The engines as one episode worker sees them: a reply survives the engine that began it.

Requests go to the engine their group belongs to while it lives. When an engine is lost, each unfinished reply goes on
at another engine, or at the replacement, from the tokens that have arrived: the noise of a token depends on its
seed and position alone, so on CPU the continued reply is the one the lost engine would have given, bit for bit
(on GPU it is equal in distribution).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import RayError

from argusrl.errors import ArgusError, EngineError, WorkerLost
from argusrl.rollout.engine import SampleRequest, Span
from argusrl.training.calls import translate

_ABORT_SECONDS = 3.0  # less than a driver waits for this worker


@dataclass(slots=True)
class _Link:
    """One engine: a task collects what it sampled for this worker and hands it to the requests."""

    number: int
    actor: Any
    client: str
    waiting: dict[str, asyncio.Queue[Span | Exception]] = field(default_factory=dict)
    epoch: int = 0
    lost: bool = False
    collector: asyncio.Task[None] | None = None

    async def sample(self, epoch: int, step: int, request: SampleRequest) -> AsyncIterator[Span]:
        """Raises WorkerLost when the engine is gone, EngineError for a fault of this request alone."""
        queue: asyncio.Queue[Span | Exception] = asyncio.Queue()
        self.waiting[request.id] = queue
        self.epoch = max(self.epoch, epoch)
        open_seeds = len(request.seeds)
        try:
            try:
                await self.actor.submit.remote(epoch, step, self.client, request)
            except RayError as error:
                raise self._fault(error) from error
            if self.collector is None:
                self.collector = asyncio.create_task(self._collect())
            while open_seeds:
                item = await queue.get()
                if isinstance(item, Exception):
                    self.lost = self.lost or isinstance(item, WorkerLost)
                    raise item
                open_seeds -= item.stop is not None
                yield item
        finally:
            del self.waiting[request.id]
            if open_seeds and not self.lost:
                await self._abort(request.id)

    async def _abort(self, request_id: str) -> None:
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(_ABORT_SECONDS):
                await self.actor.abort.remote(self.epoch, [request_id])

    async def _collect(self) -> None:
        """Ends when nobody waits any more, or when the engine is lost."""
        confirmed = 0
        try:
            while self.waiting:
                first, items = await self.actor.collect.remote(self.epoch, self.client, confirmed)
                for number, item in enumerate(items, start=first):
                    if number >= confirmed and item.request_id in self.waiting:
                        self.waiting[item.request_id].put_nowait(item.error or item.span)
                confirmed = max(confirmed, first + len(items))
        except RayError as error:
            self._everyone(self._fault(error))
        except Exception as error:
            logging.exception("collecting from engine %s failed", self.number)
            self._everyone(EngineError(f"collecting from engine {self.number}: {type(error).__name__}: {error}"))
        finally:
            self.collector = None

    def _fault(self, error: RayError) -> ArgusError:
        fault = translate(error, "sample", f"engine {self.number}")
        if isinstance(fault, WorkerLost):
            self.lost = True
        return fault

    def close(self, reason: WorkerLost) -> None:
        """The engine was replaced: nothing of it counts any more."""
        self.lost = True
        if self.collector is not None:
            self.collector.cancel()
        self._everyone(reason)

    def _everyone(self, fault: Exception) -> None:
        for queue in self.waiting.values():
            queue.put_nowait(fault)


@dataclass(slots=True)
class _Part:
    """Seeds of a request that run together: their places there, and the tokens each one has already."""

    places: list[int]
    request: SampleRequest
    received: dict[int, list[int]] = field(default_factory=dict)  # by place
    ended: set[int] = field(default_factory=set)


class EngineLinks:
    """All engines of a run, by number. `set` tells which live."""

    def __init__(self, client: str) -> None:
        self.client = client
        self._links: dict[int, _Link] = {}
        self._changed = asyncio.Event()
        self._parts = itertools.count(1)
        self.continued_tokens = 0  # tokens that a lost engine had sampled and another one went on from

    def take_continued_tokens(self) -> int:
        """`continued_tokens`, which then begins anew."""
        tokens, self.continued_tokens = self.continued_tokens, 0
        return tokens

    def set(self, actors: Mapping[int, Any]) -> None:
        """The engines that serve from now on."""
        for number, link in list(self._links.items()):
            if number not in actors or actors[number] != link.actor:
                link.close(WorkerLost(f"engine {number} was replaced").of(f"engine {number}"))
                del self._links[number]
        for number, actor in actors.items():
            if number not in self._links:
                self._links[number] = _Link(number=number, actor=actor, client=f"{self.client}-{id(actor):x}")
        self._changed.set()
        self._changed = asyncio.Event()

    async def sample(self, epoch: int, step: int, home: int, request: SampleRequest) -> AsyncIterator[Span]:
        """The port's `sample`, on engine `home` while it lives. Raises EngineError for a fault of the request."""
        out: asyncio.Queue[Span | Exception] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()

        def run(part: _Part) -> None:
            tasks.add(asyncio.create_task(self._run(epoch, step, home, part, out, run)))

        run(self._part(request, list(range(len(request.seeds)))))
        open_seeds = len(request.seeds)
        try:
            while open_seeds:
                item = await out.get()
                if isinstance(item, Exception):
                    raise item
                open_seeds -= item.stop is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, epoch: int, step: int, home: int, part: _Part, out: asyncio.Queue[Span | Exception], run: Any
    ) -> None:
        try:
            link = await self._living(home)
            async for span in link.sample(epoch, step, part.request):
                place = part.places[span.index]
                part.received.setdefault(place, []).extend(span.ids)
                if span.stop is not None:
                    part.ended.add(place)
                out.put_nowait(replace(span, index=place))
        except WorkerLost:
            for rest in self._rests(part):
                run(rest)
        except Exception as error:
            out.put_nowait(error)

    async def _living(self, home: int) -> _Link:
        """The link of `home`, or of the next engine that lives; waits while there is none."""
        while True:
            changed = self._changed
            living = [link for _, link in sorted(self._links.items()) if not link.lost]
            for link in living:
                if link.number == home:
                    return link
            if living:
                return living[home % len(living)]
            await changed.wait()

    def _rests(self, part: _Part) -> list[_Part]:
        """What is left of a part: replies without tokens stay together, every other one goes on by itself."""
        fresh = [place for place in part.places if not part.received.get(place)]
        begun = [place for place in part.places if part.received.get(place) and place not in part.ended]
        rests = [self._rest(part, fresh, ())] if fresh else []
        for place in begun:
            tokens = tuple(part.received[place])
            self.continued_tokens += len(tokens)
            rests.append(self._rest(part, [place], tokens))
        return rests

    def _rest(self, part: _Part, places: Sequence[int], tokens: tuple[int, ...]) -> _Part:
        seeds = dict(zip(part.places, part.request.seeds, strict=True))
        request = replace(
            part.request,
            collapsed_ids=part.request.collapsed_ids + tokens,
            expanded_ids=part.request.expanded_ids + tokens,
            seeds=tuple(seeds[place] for place in places),
            max_tokens=part.request.max_tokens - len(tokens),
        )
        return self._part(request, places)

    def _part(self, request: SampleRequest, places: Sequence[int]) -> _Part:
        # A name of its own: episodes may ask for the same turn of the same prompt again.
        name = f"{request.id.partition('~')[0]}~{self.client}.{next(self._parts)}"
        return _Part(list(places), replace(request, id=name))

    def close(self) -> None:
        """Forget all engines."""
        self.set({})
