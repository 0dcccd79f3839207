from __future__ import annotations

import asyncio

import pytest

from argusrl.training.phases import Colocation, Phase


class Memory:
    """One GPU: what lies on it may never exceed what it has."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.held: dict[str, int] = {}
        self.log: list[str] = []

    def take(self, what: str, amount: int) -> None:
        self.log.append(f"+{what}")
        self.held[what] = amount
        assert sum(self.held.values()) <= self.size, self.held

    def give(self, *names: str) -> None:
        for name in names:
            self.log.append(f"-{name}")
            self.held.pop(name, None)


class Engines:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    async def sleep(self) -> None:
        self.memory.give("cache", "weights")

    async def wake_weights(self) -> None:
        self.memory.take("weights", 4)

    async def wake_cache(self) -> None:
        self.memory.take("cache", 5)


class Ranks:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    async def offload(self) -> None:
        self.memory.give("rank")

    async def onload(self) -> None:
        self.memory.take("rank", 8)


def cycle(colocation: Colocation) -> None:
    async def run() -> None:
        await colocation.to_sync()
        await colocation.to_rollout()
        await colocation.to_training()

    asyncio.run(run())


def test_ranks_and_engines_are_never_in_memory_together():
    memory = Memory()
    memory.take("rank", 8)  # after start-up
    colocation = Colocation(Engines(memory), Ranks(memory), shared=True)
    cycle(colocation)
    cycle(colocation)
    assert memory.log[1:7] == ["-rank", "+weights", "+cache", "-cache", "-weights", "+rank"]
    assert colocation.phase is Phase.TRAINING


def test_fleets_of_their_own_move_nothing():
    memory = Memory()
    cycle(Colocation(Engines(memory), Ranks(memory), shared=False))
    assert memory.log == []


def test_a_phase_out_of_order_is_a_bug():
    colocation = Colocation(Engines(Memory()), Ranks(Memory()), shared=True)
    with pytest.raises(RuntimeError, match="training, not rollout"):
        asyncio.run(colocation.to_training())
