"""A node that is to be left: with a table of nodes in place of Ray's, and probes that know which pod is where."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from argusrl.errors import WorkerLost
from argusrl.journal.drains import Drain, Drained, answer_drain, ask_for_drain, read_drained
from argusrl.storage.layout import RunFolder
from argusrl.training import draining, nodes
from argusrl.training.draining import Draining, NodeLeaving
from argusrl.training.fleet import Member
from argusrl.training.healing import Healing
from argusrl.training.nodes import Nodes
from argusrl.training.placement import Layout

LAYOUT = Layout("cpu", ranks=2, engines=2, colocate=True, episode_workers=2, cpus_per_slot=1.0)


class Placement:
    """Bundle 0 on node A, bundle 1 on node B; the driver is on node H."""

    layout = LAYOUT

    def __init__(self) -> None:
        self.left: set[str] = set()

    def homes(self) -> dict[int, str]:
        return {bundle: node for bundle, node in {0: "A", 1: "B"}.items() if node not in self.left}


class Probes:
    """Pod a is on node A, and so on."""

    def __init__(self, *pods: str) -> None:
        self.pods = set(pods)
        self.left: list[str] = []
        self.logs: list[str] = []

    def known(self, pod: str) -> str | None:
        return pod.upper() if pod in self.pods else None

    async def node_of(self, pod: str, patience_seconds: float) -> str | None:
        return self.known(pod)

    async def leave(self, node: str) -> bool:
        self.left.append(node)
        self.dead.add(node)
        return True

    async def keep_logs_of(self, node: str) -> None:
        self.logs.append(node)


class Fleet:
    def __init__(self, kind: str, count: int) -> None:
        self.kind = kind
        self.members = [Member(n, f"{kind}{n}", fresh=False) for n in range(count)]
        self.replaced: list[int] = []

    def replace(self, number: int) -> None:
        self.replaced.append(number)


class World:
    """A run with its healing, as far as a drain touches them."""

    def __init__(self, tmp_path, monkeypatch, *pods: str) -> None:
        self.folder = RunFolder(tmp_path)
        self.dead: set[str] = set()
        self.killed: list[str] = []
        self.events: list[tuple[str, dict]] = []
        monkeypatch.setattr(nodes, "_dead_nodes", lambda: set(self.dead))
        monkeypatch.setattr(nodes, "_POLL_SECONDS", 0.001)
        monkeypatch.setattr(draining, "_LOOK_SECONDS", 0.005)
        monkeypatch.setattr(draining, "_GONE_SECONDS", 0.5)
        monkeypatch.setattr(draining, "_drain_in_ray", lambda node, drain: None)
        monkeypatch.setattr(draining, "kill", self.killed.append)
        monkeypatch.setattr(Draining, "_own_node", lambda self: "H")
        self.workers = SimpleNamespace(
            engines=Fleet("engine", 2), ranks=Fleet("rank", 2), episodes=Fleet("w", 2), position=None
        )
        self.run = SimpleNamespace(
            folder=self.folder,
            workers=self.workers,
            epoch=SimpleNamespace(number=1),
            stop=asyncio.Event(),
            leaving=asyncio.Event(),
            say=lambda kind, text, **fields: self.events.append((kind, fields)),
        )
        self.probes = Probes(*pods)
        self.probes.dead = self.dead
        self.healing = SimpleNamespace(
            run=self.run,
            nodes=Nodes(Placement()),
            judged_nodes={},
            engines=Fleet("engine", 2),
            absent=SimpleNamespace(ready={}),
            hiring=SimpleNamespace(standbys=["standby"]),
        )
        self.healing.nodes.where |= {("w", 0): "A", ("w", 1): "B"}
        self.drains = Draining(self.healing, self.probes)

    def ask(self, pod: str, deadline_seconds: float = 30.0) -> None:
        wish = Drain(
            pod=pod, reason="label", asked_by="controller", time=time.time(), deadline_seconds=deadline_seconds
        )
        ask_for_drain(self.folder, wish)

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


async def until(what) -> None:
    async with asyncio.timeout(5):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.fixture
def world(tmp_path, monkeypatch):
    return lambda *pods: World(tmp_path, monkeypatch, *pods)


def test_a_node_is_left_once_the_journal_is_sealed(world):
    async def play():
        w = world("a", "b")
        w.ask("b")
        w.drains.start()
        await asyncio.wait_for(w.run.leaving.wait(), 5)
        assert w.healing.nodes.is_left("B")
        assert w.healing.nodes.lost_node(("rank", 1)) == "B"
        assert w.healing.judged_nodes["B"].action == "recover"  # no fault that counts
        assert w.killed == []  # nothing ends before the driver says that everything is sealed
        await w.drains.empty()
        await w.drains.stop(sealed=False)
        return w

    w = asyncio.run(play())
    assert w.killed == ["engine1", "rank1"]
    assert (w.healing.engines.replaced, w.workers.episodes.replaced) == ([1], [1])
    assert w.workers.ranks.members[1].fresh
    assert not w.workers.ranks.members[0].fresh
    assert (w.probes.left, w.probes.logs) == (["B"], ["B"])
    assert not w.run.leaving.is_set()
    answer = read_drained(w.folder, "b")
    assert (answer.outcome, w.kinds()) == ("drained", ["draining", "drained"])


def test_standbys_end_with_the_node_they_are_on(world):
    async def play():
        w = world("a")
        w.ask("a")
        w.drains.start()
        await asyncio.wait_for(w.run.leaving.wait(), 5)
        await w.drains.empty()
        await w.drains.stop(sealed=False)
        return w

    assert asyncio.run(play()).killed == ["standby", "engine0", "rank0"]


def test_what_has_not_ended_by_the_deadline_is_abandoned(world, monkeypatch):
    monkeypatch.setattr(draining, "_MARGIN_SECONDS", 0.0)

    async def play():
        w = world("b")
        w.ask("b", deadline_seconds=0.02)
        w.drains.start()
        await until(lambda: read_drained(w.folder, "b"))
        assert read_drained(w.folder, "b").outcome == "abandoned"
        assert w.killed == ["engine1", "rank1"]
        assert w.run.leaving.is_set()  # the loop still has to go on without the node
        await w.drains.empty()
        assert w.killed == ["engine1", "rank1"]  # once
        await w.drains.stop(sealed=False)

    asyncio.run(play())


def test_a_pod_that_nobody_knows_and_a_node_without_workers_disturb_nobody(world):
    async def play():
        w = world("c")
        w.ask("x")
        w.ask("c")
        w.drains.start()
        await until(lambda: read_drained(w.folder, "x") and w.probes.left)
        await w.drains.stop(sealed=False)
        assert read_drained(w.folder, "x").outcome == "nothing there"
        assert read_drained(w.folder, "c").outcome == "drained"
        assert not w.run.leaving.is_set()
        assert w.probes.left == ["C"]

    asyncio.run(play())


def test_the_drivers_own_node_ends_the_run_in_good_order(world):
    async def play(sealed: bool):
        w = world("h")
        w.ask("h")
        w.drains.start()
        await asyncio.wait_for(w.run.stop.wait(), 5)
        await w.drains.stop(sealed=sealed)
        return read_drained(w.folder, "h")

    assert asyncio.run(play(sealed=False)) is None
    assert asyncio.run(play(sealed=True)).outcome == "drained"


def test_a_driver_stays_on_the_node_that_a_driver_before_it_was_asked_to_leave(world):
    async def play():
        w = world("h")
        w.ask("h")
        answer_drain(w.folder, Drained(pod="h", outcome="drained", seconds=1.0))
        w.drains.start()
        await asyncio.sleep(0.05)
        await w.drains.stop(sealed=False)
        assert not w.run.stop.is_set()
        assert w.events == []

    asyncio.run(play())


def test_when_the_run_ends_in_good_order_every_node_may_go(world, monkeypatch):
    async def play():
        w = world("a", "b")
        w.ask("a")
        w.ask("b")
        w.drains.start()
        await until(lambda: len(w.events) == 2)
        await w.drains.stop(sealed=True)
        return [read_drained(w.folder, pod).outcome for pod in ("a", "b")]

    assert asyncio.run(play()) == ["drained", "drained"]


def test_a_pod_that_comes_back_on_a_node_that_was_left_is_not_used(world):
    async def play():
        w = world()
        w.ask("b")
        answer_drain(w.folder, Drained(pod="b", outcome="drained", seconds=1.0))  # by a driver before this one
        w.drains.start()
        await asyncio.sleep(0.02)
        assert w.events == []
        w.probes.pods.add("b")
        await asyncio.wait_for(w.run.leaving.wait(), 5)
        await w.drains.empty()
        await w.drains.stop(sealed=False)
        assert w.probes.left == ["B"]
        assert read_drained(w.folder, "b").seconds == 1.0  # the answer stands

    asyncio.run(play())


def test_what_is_good_to_have_gets_the_time_that_is_left(world, monkeypatch):
    monkeypatch.setattr(draining, "_MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(draining, "_ENDING_SECONDS", 0.0)

    async def play(seconds: float) -> list[str]:
        done: list[str] = []

        async def work() -> None:
            await asyncio.sleep(seconds)
            done.append("in time")

        async def broken() -> None:
            raise WorkerLost("a rank died")

        w = world("a")
        w.ask("a", deadline_seconds=0.2)
        w.drains.start()
        await asyncio.wait_for(w.run.leaving.wait(), 5)
        await w.drains.in_time(work())
        await w.drains.in_time(broken())
        await w.drains.stop(sealed=False)
        return done

    assert asyncio.run(play(0.0)) == ["in time"]
    assert asyncio.run(play(30.0)) == []


def test_a_planned_loss_is_judged_as_none():
    class Drains:
        emptied = False

        async def empty(self) -> None:
            self.emptied = True
            run.leaving.clear()

    run = SimpleNamespace(leaving=asyncio.Event())
    run.leaving.set()
    healing = SimpleNamespace(run=run, drains=Drains())  # no judge, no history: touching them fails
    asyncio.run(Healing.prepare(healing, NodeLeaving("a node is left")))
    assert healing.drains.emptied


def test_a_rank_that_dies_on_a_node_that_is_left_is_no_fault_of_its_own(world):
    async def play():
        w = world("b")
        w.healing.nodes.leave("B")
        return await w.healing.nodes.lost_under(("rank", 1), WorkerLost("rank 1 died"))

    assert asyncio.run(play()) == "B"
