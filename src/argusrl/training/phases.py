"""Colocation: ranks and engines share GPUs, so memory changes hands between rollout and training.

The order never needs both at once: engines sleep before ranks come in; ranks leave before weights wake; adapters
are loaded before the cache returns. On CPU the same states are passed, without bytes moving.

    rollout ──to_training──► training ──(publish)──► to_sync ──► sync ──(load adapter)──► to_rollout ──► rollout
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Protocol


class Phase(StrEnum):
    ROLLOUT = "rollout"
    TRAINING = "training"
    SYNC = "sync"  # ranks are out, engines have weights but no cache


class Fleet(Protocol):
    """All engines, or all ranks, as the state machine moves them."""

    async def sleep(self) -> None: ...
    async def wake_weights(self) -> None: ...
    async def wake_cache(self) -> None: ...


class RankFleet(Protocol):
    async def offload(self) -> None: ...
    async def onload(self) -> None: ...


class Colocation:
    """Moves memory between engines and ranks. With fleets of their own (colocate: false) nothing moves."""

    def __init__(self, engines: Fleet, ranks: RankFleet, *, shared: bool) -> None:
        self.engines, self.ranks, self.shared = engines, ranks, shared
        self.phase = Phase.TRAINING  # after start-up: ranks are loaded, engines have been put to sleep
        self._moving = asyncio.Lock()
        self._rollout = asyncio.Event()

    async def engines_first(self) -> None:
        """Before ranks are built: engines asleep."""
        if self.shared:
            await self.engines.sleep()

    async def reset(self) -> None:
        """From whatever a fault left: all engines asleep, ranks loaded."""
        async with self._moving:
            if self.shared:
                await self.engines.sleep()
                await self.ranks.onload()
            self._enter(Phase.TRAINING)

    async def to_training(self) -> None:
        """Engines give their memory back, then ranks take it."""
        self._expect(Phase.ROLLOUT)
        async with self._moving:
            if self.shared:
                await self.engines.sleep()
                await self.ranks.onload()
            self._enter(Phase.TRAINING)

    async def to_sync(self) -> None:
        """Ranks leave (the adapter is on storage), then engine weights wake, so that the adapter can be loaded."""
        self._expect(Phase.TRAINING)
        if self.shared:
            await self.ranks.offload()
            await self.engines.wake_weights()
        self._enter(Phase.SYNC)

    async def to_rollout(self) -> None:
        """The cache returns; requests are accepted afterwards."""
        self._expect(Phase.SYNC)
        if self.shared:
            await self.engines.wake_cache()
        self._enter(Phase.ROLLOUT)

    @asynccontextmanager
    async def rollout(self) -> AsyncIterator[None]:
        """Waits until engines are awake and keeps them so: nobody moves memory meanwhile."""
        while True:
            await self._rollout.wait()
            async with self._moving:
                if self.phase is Phase.ROLLOUT:
                    yield
                    return

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if phase is Phase.ROLLOUT:
            self._rollout.set()
        else:
            self._rollout.clear()

    def _expect(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise RuntimeError(f"colocation is in phase {self.phase}, not {phase}")
