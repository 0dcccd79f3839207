"""Which node each worker is on, and which nodes are lost. Ray says so about three seconds after a node fell silent."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import ray
from ray.exceptions import ActorUnavailableError

from argusrl.training.placement import Placement

_VERDICT_SECONDS = 10.0  # a worker that cannot be reached is dead, or its node is, or it answers again by then
_LATELY_SECONDS = 30.0  # so long after the loss of a node a start may still have been sent there
_POLL_SECONDS = 0.25
_SPARE_SECONDS = 1.0  # a bundle that finds a spare node moves there at once

Worker = tuple[str, int]  # ("rank", 1)


@dataclass(slots=True)
class Nodes:
    """`where` holds the node on which each rank, engine and episode worker ("w") was started last."""

    placement: Placement
    where: dict[Worker, str] = field(default_factory=dict)
    _lost: dict[str, float] = field(default_factory=dict)  # when each was first seen to be lost

    def __post_init__(self) -> None:
        self._lost = dict.fromkeys(_dead_nodes(), -math.inf)
        layout, homes = self.placement.layout, self.placement.homes()
        workers = [("rank", n) for n in range(layout.ranks)] + [("engine", n) for n in range(layout.engines)]
        self.where = {one: homes[layout.bundle(*one)] for one in workers if layout.bundle(*one) in homes}

    async def homes(self) -> dict[int, str]:
        """The node of each bundle that has a living one."""
        return await asyncio.to_thread(self.placement.homes)

    async def lost_under(self, worker: Worker, fault: BaseException | None) -> str | None:
        """The lost node of a worker with this fault; None where its node lives. Waits for what Ray says about it."""
        deadline = _verdict_deadline(fault)
        while True:
            await self._look()
            node = self.lost_node(worker)
            if node or time.monotonic() >= deadline:
                return node
            await asyncio.sleep(_POLL_SECONDS)

    def leave(self, node: str) -> None:
        """This node lives, but is not used any more: whoever is on it counts as lost with it."""
        self.placement.left.add(node)
        self._lost.setdefault(node, time.monotonic())

    def is_left(self, node: str) -> bool:
        return node in self.placement.left

    async def gone(self, node: str, deadline_seconds: float) -> bool:
        """Wait until Ray says that a node is dead; whether it did by the deadline."""
        deadline = time.monotonic() + deadline_seconds
        while node not in await asyncio.to_thread(_dead_nodes):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    async def usable(self, deadline_seconds: float) -> bool:
        """Wait until there is a node for workers outside of the bundles; whether there was one by the deadline."""
        deadline = time.monotonic() + deadline_seconds
        while not await asyncio.to_thread(self.placement.usable_nodes):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True

    def lost_node(self, worker: Worker) -> str | None:
        """`lost_under`, by what is known already."""
        node = self.where.get(worker)
        return node if node in self._lost else None

    async def lost_lately(self, fault: BaseException | None = None) -> bool:
        """Whether a node was lost a moment ago, so that a start which went there explains the fault."""
        deadline = _verdict_deadline(fault)
        while True:
            await self._look()
            now = time.monotonic()
            if any(now - since < _LATELY_SECONDS for since in self._lost.values()):
                return True
            if now >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)

    async def have(self, bundles: Iterable[int], deadline_seconds: float | None = None) -> dict[int, str]:
        """`homes`, as soon as all of these bundles are in it, or after the deadline: that of a move to a spare node."""
        wanted = set(bundles)
        deadline = time.monotonic() + (_SPARE_SECONDS if deadline_seconds is None else deadline_seconds)
        while True:
            homes = await self.homes()
            if homes.keys() >= wanted or time.monotonic() >= deadline:
                return homes
            await asyncio.sleep(_POLL_SECONDS)

    async def _look(self) -> None:
        for node in await asyncio.to_thread(_dead_nodes):
            self._lost.setdefault(node, time.monotonic())


def _verdict_deadline(fault: BaseException | None) -> float:
    cause = fault.__cause__ if fault is not None else None
    return time.monotonic() + (_VERDICT_SECONDS if isinstance(cause, ActorUnavailableError) else 0.0)


def _dead_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
