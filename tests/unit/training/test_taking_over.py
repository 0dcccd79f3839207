"""A new driver, or the same one under a new epoch, takes over workers that live."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from argusrl.rollout.engine import SampleRequest, Span
from argusrl.training.engine_worker import EngineWorker
from argusrl.training.episode_worker import EpisodeWorker
from argusrl.training.fence import Fence
from argusrl.training.healing import Healing
from argusrl.types import StopReason

LEASE = SimpleNamespace(renew=lambda: None)


class Actor:
    """A worker of this process, called as Ray calls one of another process."""

    def __init__(self, worker: object) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> SimpleNamespace:
        method = getattr(self.worker, name)
        return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(method(*arguments)))


class ThreeTokens:
    async def sample(self, request):
        for number in range(3):
            await asyncio.sleep(0.01)
            stop = StopReason.STOP if number == 2 else None
            yield Span(index=0, ids=(number,), logprobs=(-1.0,), stop=stop)


def engine_worker() -> EngineWorker:
    worker = EngineWorker.__new__(EngineWorker)
    worker.fence, worker.lease, worker.engine, worker.identity = Fence(), LEASE, ThreeTokens(), "ours"
    worker._mailboxes, worker._requests = {}, {}
    return worker


def episode_worker() -> EpisodeWorker:
    worker = EpisodeWorker.__new__(EpisodeWorker)
    worker.name, worker.fence, worker.lease, worker.identity = "w0", Fence(), LEASE, "ours"
    worker.links, worker.journal, worker.playing, worker.begun, worker.unfinished = None, None, set(), set(), {}
    return worker


async def reply(worker: EpisodeWorker, epoch: int) -> list[int]:
    request = SampleRequest(
        id="1/p/0",
        collapsed_ids=(1,),
        expanded_ids=(1,),
        images=(),
        seeds=(7,),
        temperature=1.0,
        max_tokens=3,
        adapter_version=0,
    )
    async with asyncio.timeout(2.0):
        return [token async for span in worker.links.sample(epoch, 1, 0, request) for token in span.ids]


def test_a_reply_is_whole_although_the_driver_before_left_a_collect_under_way():
    async def play() -> list[list[int]]:
        engine, episodes = engine_worker(), episode_worker()
        actor, replies = Actor(engine), []
        for epoch in (1, 2):  # the collect of epoch 1 still waits when epoch 2 begins
            await engine.attach(epoch, "ours")
            await episodes.attach(epoch, "ours")
            await episodes.set_engines(epoch, 0, {0: actor})
            replies.append(await reply(episodes, epoch))
        episodes.links.close()
        return replies

    assert asyncio.run(play()) == [[0, 1, 2], [0, 1, 2]]


def test_a_straggler_is_told_of_once_per_step():
    said = []
    position = SimpleNamespace(step=4)
    run = SimpleNamespace(
        workers=SimpleNamespace(position=position),
        say=lambda kind, message, **fields: said.append((kind, fields["step"], fields["member"], fields["ratio"])),
    )
    healing = SimpleNamespace(run=run, stragglers={})
    for step in (4, 4, 5):
        position.step = step
        Healing.straggles(healing, "rank 1", 9.96)
    assert said == [("straggler", 4, "rank 1", 10.0), ("straggler", 5, "rank 1", 10.0)]
