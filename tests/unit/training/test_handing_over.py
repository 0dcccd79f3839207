"""Engines get an adapter from memory; where there is none, one of them reads its folder for all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from argusrl.errors import ArgusError, StorageError, WorkerError, WorkerLost
from argusrl.training.canary import Verification
from argusrl.training.engine_worker import EngineProof
from argusrl.training.fleet import EngineFleet, Member, Position
from argusrl.training.step import synchronise
from argusrl.types import AdapterRef, TrajectoryKey, TrajectoryRef

CANARY: Any = TrajectoryRef(
    key=TrajectoryKey(step=0, prompt_id="p", sample=0), segment="s", offset=0, length=0, reward=0.0, rewards={},
    prompt_tokens=0, response_tokens=0, image_patches=0, truncated=False,
)  # fmt: skip


def adapter(version: int) -> AdapterRef:
    return AdapterRef(version=version, epoch=1, path=f"adapters/v{version}", sha256="a" * 64, file_sha256="b" * 64)


class FakeEngine:
    """An actor: `loaded` are the objects it was handed, `reads` the versions it read from storage."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.loaded: list[Any] = []
        self.reads: list[int] = []
        self.fails: dict[str, ArgusError] = {}

    def __getattr__(self, method: str) -> Any:
        def remote(epoch: int, step: int, *arguments: Any) -> Any:
            return self._do(method, *arguments)

        def pair(epoch: int, step: int, *arguments: Any) -> Any:
            return self._do(method, *arguments), f"object of engine {self.place}"

        return SimpleNamespace(remote=remote, options=lambda num_returns: SimpleNamespace(remote=pair))

    async def _do(self, method: str, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        if method in self.fails:
            raise self.fails.pop(method)
        if method == "read_adapter":
            self.reads.append(arguments[0].version)
        if method == "load_adapter":
            self.loaded.append(arguments[1])
        return EngineProof(engine=self.place, sha256="a" * 64, canary=[-1.0]) if method == "prove" else None


def fleet(engines: int) -> tuple[EngineFleet, list[FakeEngine]]:
    actors = [FakeEngine(place) for place in range(engines)]
    made = EngineFleet([Member(one.place, one) for one in actors], lambda _: None, "id", Position(1), 5.0)  # type: ignore
    made.serving = set(range(engines))
    return made, actors


def test_what_lies_in_memory_is_handed_to_all_and_nobody_reads() -> None:
    engines, actors = fleet(3)
    engines.memory.hold(adapter(1), "object of rank 0")
    asyncio.run(engines.load_adapter(adapter(1)))
    assert [one.loaded for one in actors] == [["object of rank 0"]] * 3
    assert engines.memory.take_reads() == 0


def test_one_engine_reads_for_all_and_once_a_version() -> None:
    engines, actors = fleet(3)
    engines.memory.hold(adapter(1), "object of rank 0")
    for version in (2, 2, 3):
        asyncio.run(engines.load_adapter(adapter(version)))
    assert [one.reads for one in actors] == [[2, 3], [], []]
    assert [one.loaded for one in actors] == [["object of engine 0"] * 3] * 3
    assert engines.memory.take_reads() == 2


def test_engines_that_come_back_at_once_share_what_one_of_them_reads() -> None:
    engines, actors = fleet(3)
    engines.serving = {0}

    async def come_back() -> Any:
        return await asyncio.gather(*(engines.bring_up_to(number, CANARY, adapter(2)) for number in (1, 2)))

    assert [proof.engine for proof in asyncio.run(come_back())] == [1, 2]
    assert [one.reads for one in actors] == [[], [2], []]
    assert [one.loaded for one in actors[1:]] == [["object of engine 1"]] * 2


def test_the_next_engine_reads_where_one_dies_of_it() -> None:
    engines, actors = fleet(2)
    lost: list[int] = []
    engines.on_lost = lambda number, fault: lost.append(number)
    actors[0].fails["read_adapter"] = WorkerLost("engine 0 died")
    asyncio.run(engines.load_adapter(adapter(2)))
    assert lost == [0]
    assert (actors[0].loaded, actors[1].loaded) == ([], ["object of engine 1"])


def test_an_object_that_was_lost_with_its_node_is_not_asked_for_again() -> None:
    engines, actors = fleet(1)
    engines.memory.hold(adapter(1), "object of a lost node")
    actors[0].fails["load_adapter"] = WorkerError("the object is lost")
    with pytest.raises(WorkerError, match="lost"):
        asyncio.run(engines.load_adapter(adapter(1)))
    asyncio.run(engines.load_adapter(adapter(1)))
    assert actors[0].loaded == ["object of engine 0"]


# ---- synchronise


class FakeRanks:
    """Publishes at once; the folder is durable when `storage` says so, or fails as it says."""

    def __init__(self) -> None:
        self.storage: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def publish(self, version: int) -> tuple[AdapterRef, str]:
        return adapter(version), "object of rank 0"

    async def canary(self) -> list[float]:
        return [-1.0]

    async def state_digest(self) -> str:
        return "digest"

    async def published(self) -> None:
        await self.storage


def synchronising() -> tuple[Any, list[FakeEngine], list[str]]:
    engines, actors = fleet(2)
    passed: list[str] = []

    async def nothing(*_: Any) -> None:
        return None

    async def unless_stopped(work: Any) -> Any:
        return await work

    workers = SimpleNamespace(ranks=FakeRanks(), engines=engines)
    run = SimpleNamespace(
        workers=workers,
        serve_too=lambda serving: None,
        config=SimpleNamespace(cluster=SimpleNamespace(start_timeout_seconds=5.0)),
        colocation=SimpleNamespace(to_sync=nothing, to_rollout=nothing),
        unless_stopped=unless_stopped,
        at=passed.append,
        verify=lambda *_: Verification(gap=0.0, by_effect=True),
    )
    return run, actors, passed


def test_engines_have_proven_the_adapter_before_its_folder_is_durable_and_the_step_waits_for_it() -> None:
    async def work() -> None:
        run, actors, passed = synchronising()
        task = asyncio.create_task(synchronise(run, 1))
        await asyncio.sleep(0.05)
        assert [one.loaded for one in actors] == [["object of rank 0"]] * 2
        assert passed == ["staged"]
        assert not task.done()
        run.workers.ranks.storage.set_result(None)
        synced = await task
        assert passed == ["staged", "published", "synced"]
        assert (synced.adapter, synced.state_digest) == (adapter(1), "digest")
        assert synced.storage_reads == 0
        await run.workers.engines.load_adapter(adapter(1))  # memory holds it no more: its folder is there
        assert [len(one.reads) for one in actors] == [1, 0]

    asyncio.run(work())


def test_a_folder_that_does_not_become_durable_ends_the_step_whatever_engines_proved() -> None:
    async def work() -> None:
        run, _, passed = synchronising()
        run.workers.ranks.storage.set_exception(StorageError("the disk is full"))
        with pytest.raises(StorageError, match="full"):
            await synchronise(run, 1)
        assert passed == ["staged"]

    asyncio.run(work())
