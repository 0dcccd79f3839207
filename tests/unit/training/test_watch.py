"""Who is taken for lost: the dead and the hung, not the slow."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from argusrl.config.sections import RecoverySection
from argusrl.errors import FencedError, WorkerLost
from argusrl.rollout.engine import EngineProgress
from argusrl.training import watch as module
from argusrl.training.fleet import EngineFleet, EpisodeFleet, Member, Position, RankFleet, Workers
from argusrl.training.watch import Watch

HANG_SECONDS = 0.1


class Remote:
    def __init__(self, call: Any) -> None:
        self.call = call

    def remote(self, *arguments: Any) -> Any:
        return asyncio.ensure_future(self.call(*arguments))


class Worker:
    """Answers `progress` and `beat` with what `answer` returns, raises or waits for."""

    def __init__(self, answer: Any) -> None:
        async def ask(epoch: int) -> Any:
            return await answer()

        self.progress = self.beat = Remote(ask)


@pytest.fixture
def watched(monkeypatch):
    """Watch one worker of a kind for a while; (what was found, whether it was made anew)."""
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0.01)
    killed: list[Any] = []
    monkeypatch.setattr(module, "kill", killed.append)
    monkeypatch.setattr("argusrl.training.fleet.kill", killed.append)

    def watch(kind: type, answer: Any, seconds: float = 3 * HANG_SECONDS) -> SimpleNamespace:
        position = watch.position = Position(3)

        async def fine() -> Any:
            return EngineProgress()

        def fleet(cls: type, number: int) -> Any:
            worker = Worker(answer if cls is kind else fine)
            member = Member(0, worker, fresh=False)
            return cls([member], lambda place: Member(place, Worker(fine)), "id", position, 5.0)

        engines, ranks, episodes = (fleet(cls, 0) for cls in (EngineFleet, RankFleet, EpisodeFleet))
        engines.serving = {0}
        lost: list[Exception] = []
        engines.on_lost = lambda number, fault: lost.append(fault)
        fenced: list[Exception] = []
        workers = Workers(engines, ranks, episodes, position, Path(), [])
        recovery = RecoverySection(hang_seconds=HANG_SECONDS)

        async def run() -> None:
            watch = Watch(workers, recovery, fenced.append)
            watch.start()
            await asyncio.sleep(seconds)
            await watch.stop()

        asyncio.run(run())
        lost += [*ranks.losses.values(), *episodes.losses.values()]
        return SimpleNamespace(lost=lost, killed=len(killed), fenced=fenced)

    return watch


async def dead() -> Any:
    raise ActorDiedError()


async def hung() -> Any:
    await asyncio.sleep(3600)


@pytest.mark.parametrize("kind", [EngineFleet, RankFleet, EpisodeFleet])
@pytest.mark.parametrize(("answer", "words"), [(dead, "died"), (hung, "did not answer")])
def test_the_dead_and_the_hung_are_found_once(watched, kind, answer, words):
    found = watched(kind, answer)
    assert len(found.lost) == 1
    assert words in str(found.lost[0])
    assert found.killed == 1


@pytest.mark.parametrize("kind", [EngineFleet, RankFleet, EpisodeFleet])
def test_one_that_answers_late_but_in_time_is_left_alone(watched, kind):
    async def slow() -> Any:
        await asyncio.sleep(HANG_SECONDS / 2)
        return EngineProgress()

    assert watched(kind, slow).lost == []


def test_an_engine_that_answers_but_does_not_move_is_hung(watched):
    async def stuck() -> Any:
        return EngineProgress(running_requests=4, steps=17, generated_tokens=100)

    found = watched(EngineFleet, stuck)
    assert "no progress" in str(found.lost[0])
    assert found.killed == 1


@pytest.mark.parametrize("counter", ["steps", "generated_tokens"])
def test_an_engine_in_a_long_prompt_or_a_long_reply_moves(watched, counter):
    count = 0

    async def working() -> Any:
        nonlocal count
        count += 1
        return EngineProgress(running_requests=1, **{counter: count})

    assert watched(EngineFleet, working).lost == []


def test_an_engine_without_requests_may_rest(watched):
    async def idle() -> Any:
        return EngineProgress(running_requests=0, steps=17)

    assert watched(EngineFleet, idle).lost == []


def test_an_engine_that_broke_inside_its_process_is_lost(watched):
    async def broken() -> Any:
        raise RayTaskError("progress", "Traceback: …", WorkerLost("the engine failed in a step")).as_instanceof_cause()

    assert "failed in a step" in str(watched(EngineFleet, broken).lost[0])


def test_a_worker_of_a_newer_driver_fences_this_one(watched):
    async def theirs() -> Any:
        raise RayTaskError("beat", "Traceback: …", FencedError("epoch 4 owns this worker")).as_instanceof_cause()

    found = watched(RankFleet, theirs)
    assert found.lost == []
    assert isinstance(found.fenced[0], FencedError)


def test_a_question_that_an_own_new_epoch_overtook_is_not_a_rival(watched):
    async def overtaken() -> Any:
        watched.position.epoch += 1  # claimed while the question was on its way
        raise RayTaskError("beat", "Traceback: …", FencedError("epoch 4 came first")).as_instanceof_cause()

    found = watched(RankFleet, overtaken)
    assert (found.lost, found.fenced) == ([], [])


def test_a_watch_survives_a_worker_that_answers_nonsense(watched):
    async def broken() -> Any:
        raise RayTaskError("beat", "Traceback: …", KeyError("what")).as_instanceof_cause()

    assert "KeyError" in str(watched(RankFleet, broken).lost[0])


def test_standbys_and_those_that_start_keep_their_leases():
    beats: list[tuple[str, int]] = []

    def actor(name: str) -> Any:
        return SimpleNamespace(beat=SimpleNamespace(remote=lambda epoch: beats.append((name, epoch))))

    def fleet(cls: type, name: str) -> Any:
        return cls([Member(0, actor(name))], lambda _: None, "id", Position(3), 5.0)

    workers = Workers(fleet(EngineFleet, "e"), fleet(RankFleet, "r"), fleet(EpisodeFleet, "w"), Position(3), Path(), [])
    workers.standbys.append(actor("standby"))

    async def run() -> None:
        task = asyncio.create_task(module.keep_alive(workers.actors, workers.position, 0.1))
        await asyncio.sleep(0.015)
        workers.position.epoch = 4
        await asyncio.sleep(0.03)
        task.cancel()

    asyncio.run(run())
    assert {(name, epoch) for name in ("e", "r", "w", "standby") for epoch in (3, 4)} == set(beats)
