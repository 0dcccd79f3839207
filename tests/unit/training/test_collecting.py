"""Garbage is collected beside the run; what went wrong is told once, to whoever goes on."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from argusrl.errors import StorageError
from argusrl.training import collecting
from argusrl.training.collecting import Collector

RUN: Any = SimpleNamespace(
    config=SimpleNamespace(
        checkpoint=SimpleNamespace(keep=1, keep_adapters=1, keep_trajectories=True),
        rollout=SimpleNamespace(staleness=0),
    ),
    folder="folder",
    chain=SimpleNamespace(),
    state=SimpleNamespace(step=7),
    rehearsal=None,
)
BEST: Any = SimpleNamespace(step=3)


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Each collection waits for `gate` and raises `error`, if there is one."""
    made = SimpleNamespace(gate=threading.Event(), asked=[], error=None)

    def collect(folder: Any, chain: Any, **options: Any) -> None:
        made.asked.append(options)
        assert chain is not RUN.chain
        assert made.gate.wait(10)
        if made.error is not None:
            raise made.error

    monkeypatch.setattr(collecting, "collect_garbage", collect)
    return made


def test_the_run_goes_on_meanwhile_and_one_collection_follows_the_other(collections: SimpleNamespace) -> None:
    async def work() -> None:
        collector = Collector()
        await collector.go_on(RUN, BEST)
        again = asyncio.create_task(collector.go_on(RUN, BEST))
        await asyncio.sleep(0.05)
        assert len(collections.asked) == 1
        assert not again.done()
        collections.gate.set()
        await again
        await collector.wait()

    asyncio.run(work())
    assert len(collections.asked) == 2
    assert collections.asked[0]["from_step"] == 6
    assert collections.asked[0]["protected_versions"] == {0, 3}


def test_what_went_wrong_is_raised_where_the_next_one_begins(collections: SimpleNamespace) -> None:
    async def work() -> None:
        collector = Collector()
        collections.error = StorageError("away")
        collections.gate.set()
        await collector.go_on(RUN, BEST)
        with pytest.raises(StorageError, match="away"):
            await collector.go_on(RUN, BEST)
        collections.error = None
        await collector.go_on(RUN, BEST)
        await collector.wait()

    asyncio.run(work())


def test_nothing_is_deleted_any_more_once_it_has_stopped(collections: SimpleNamespace) -> None:
    async def work() -> None:
        collector = Collector()
        collections.error = StorageError("away")
        await collector.go_on(RUN, BEST)
        stopping = asyncio.create_task(collector.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        collections.gate.set()
        await stopping  # a fault is being healed: this one is not told

    asyncio.run(work())


@pytest.mark.parametrize("staleness", [0, 1])
def test_adapters_that_a_restart_serves_are_kept(
    staleness: int, collections: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RUN.config.rollout, "staleness", staleness)
    collections.gate.set()

    async def work() -> None:
        collector = Collector()
        await collector.go_on(RUN, BEST)
        await collector.wait()

    asyncio.run(work())
    assert [asked["keep_adapters"] for asked in collections.asked] == [1 + staleness]
