"""Engines that are lost while others, or their own return, are under way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from argusrl.errors import ArgusError, CorruptionError, WorkerLost
from argusrl.recovery.decide import Decision
from argusrl.storage.layout import RunFolder
from argusrl.training.fleet import EngineFleet, EpisodeFleet, Member, Position
from argusrl.training.healing import Healing
from argusrl.training.replacing import Replacing


def fleet(kind: type, attach: Any) -> Any:
    def member(place: int) -> Member:
        return Member(place, SimpleNamespace(attach=SimpleNamespace(remote=attach)))

    return kind([member(0)], member, "id", Position(1), 1.0)


def run_of(engines: EngineFleet) -> Any:
    recovery = SimpleNamespace(hang_seconds=1.0)
    config = SimpleNamespace(recovery=recovery, cluster=SimpleNamespace(start_timeout_seconds=1.0))
    return SimpleNamespace(workers=SimpleNamespace(engines=engines), config=config)


async def nothing(epoch: int, identity: str) -> bool:
    return True


def test_an_engine_that_is_lost_while_its_return_is_made_known_is_replaced_again():
    engines, judged = fleet(EngineFleet, nothing), []

    async def judge(number: int, fault: ArgusError) -> Decision:
        judged.append(fault.message)
        return Decision("replace_engine", "")

    async def lose() -> Replacing:
        replacing: Any = Replacing(run_of(engines), cast(Any, None), cast(Any, None), judge)
        engines.serving, engines.on_lost = {0}, replacing.lost
        faults = [WorkerLost("killed again")]

        async def replace(number: int) -> None:
            engines.admit(number)
            if faults:
                engines.lost(number, faults.pop())
            await asyncio.sleep(0)

        replacing._replace = replace
        engines.lost(0, WorkerLost("killed"))
        await replacing.tasks[0]
        return replacing

    replacing = asyncio.run(lose())
    assert judged == ["killed", "killed again"]
    assert engines.serving == {0}
    assert (replacing.tasks, replacing.lost_again) == ({}, {})


def test_bytes_that_no_engine_can_mend_end_the_run_instead_of_engine_after_engine(tmp_path):
    engines, given_up = fleet(EngineFleet, nothing), []

    async def lose() -> None:
        run = run_of(engines)
        run.folder, run.chain, run.give_up = RunFolder(tmp_path), SimpleNamespace(head_sha256=""), given_up.append
        run.folder.config.touch()
        replacing: Any = Replacing(run, cast(Any, None), cast(Any, None), cast(Any, None))
        damage = CorruptionError("adapter_model.safetensors is damaged")

        async def replace(number: int) -> None:
            raise damage

        replacing._replace = replace
        replacing.replace(0)
        await replacing.tasks[0]
        assert given_up == [damage]
        assert 0 not in replacing

    asyncio.run(lose())


def test_what_dies_while_it_starts_is_made_anew_for_the_next_try():
    async def dies(epoch: int, identity: str) -> bool:
        raise WorkerLost("episode worker 0 died")

    async def attach() -> bool:
        episodes = fleet(EpisodeFleet, dies)
        one: Any = Healing.__new__(Healing)
        one.run = run_of(fleet(EngineFleet, nothing))
        before = episodes.members[0]
        with pytest.raises(WorkerLost):
            await Healing._attached(one, episodes, 0)
        return episodes.members[0] is not before

    assert asyncio.run(attach())
