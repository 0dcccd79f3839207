"""Engines that are lost while others, or their own return, are under way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from argusrl.errors import ArgusError, WorkerLost
from argusrl.recovery.decide import Decision
from argusrl.training.fleet import EngineFleet, EpisodeFleet, Member, Position
from argusrl.training.healing import Healing


def fleet(kind: type, attach: Any) -> Any:
    def member(place: int) -> Member:
        return Member(place, SimpleNamespace(attach=SimpleNamespace(remote=attach)))

    return kind([member(0)], member, "id", Position(1), 1.0)


def healing(engines: EngineFleet) -> Any:
    """Its rule is to go on, its replacement of an engine is what a test says."""
    made: Any = Healing.__new__(Healing)
    made.replacing, made.lost_again = {}, {}
    made.judged = []
    recovery = SimpleNamespace(hang_seconds=1.0)
    config = SimpleNamespace(recovery=recovery, cluster=SimpleNamespace(start_timeout_seconds=1.0))
    made.run = SimpleNamespace(workers=SimpleNamespace(engines=engines), config=config)

    async def judge(kind: str, place: int, name: str, fault: ArgusError) -> Decision:
        made.judged.append(fault.message)
        return Decision("replace_engine", "")

    made._judge_lost = judge
    return made


async def nothing(epoch: int, identity: str) -> bool:
    return True


def test_an_engine_that_is_lost_while_its_return_is_made_known_is_replaced_again():
    async def lose() -> Any:
        engines = fleet(EngineFleet, nothing)
        one = healing(engines)
        engines.serving, engines.on_lost = {0}, one.engine_lost
        faults = [WorkerLost("killed again")]

        async def replace(number: int) -> None:
            engines.admit(number)
            if faults:
                engines.lost(number, faults.pop())
            await asyncio.sleep(0)

        one._replace_engine = replace
        engines.lost(0, WorkerLost("killed"))
        await one.replacing[0]
        return one

    one = asyncio.run(lose())
    assert one.judged == ["killed", "killed again"]
    assert one.run.workers.engines.serving == {0}
    assert (one.replacing, one.lost_again) == ({}, {})


def test_what_dies_while_it_starts_is_made_anew_for_the_next_try():
    async def dies(epoch: int, identity: str) -> bool:
        raise WorkerLost("episode worker 0 died")

    async def attach() -> bool:
        episodes = fleet(EpisodeFleet, dies)
        one = healing(fleet(EngineFleet, nothing))
        before = episodes.members[0]
        with pytest.raises(WorkerLost):
            await Healing._attached(one, episodes, 0)
        return episodes.members[0] is not before

    assert asyncio.run(attach())
