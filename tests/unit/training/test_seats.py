"""What is done about nodes, with a table of them in place of Ray's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError

from argusrl.errors import NodesMissing, WorkerLost
from argusrl.training import left_behind, nodes
from argusrl.training.fleet import Member
from argusrl.training.left_behind import LeftBehind
from argusrl.training.nodes import Nodes
from argusrl.training.placement import Layout
from argusrl.training.seats import seat_ranks

LAYOUT = Layout("cpu", ranks=2, engines=2, colocate=True, episode_workers=1, cpus_per_slot=1.0)


@dataclass
class Actor:
    """Answers `attach` once `alive` is set, or fails as a lost worker does."""

    alive: bool = True

    @property
    def attach(self):
        async def answer(epoch, identity):
            if not self.alive:
                raise WorkerLost("rank 1 died").of("rank 1")

        return SimpleNamespace(remote=answer)


@dataclass
class Cluster:
    """Two bundles on two nodes."""

    layout: Layout = LAYOUT
    bundles: dict[int, str] = field(default_factory=lambda: {0: "A", 1: "B"})
    dead: set[str] = field(default_factory=set)
    made: list[int] = field(default_factory=list)
    identity = "run"
    position = SimpleNamespace(epoch=1)

    @property
    def placement(self) -> Cluster:
        return self

    def homes(self) -> dict[int, str]:
        return {bundle: node for bundle, node in self.bundles.items() if node not in self.dead}

    def rank(self, place: int) -> Member:
        self.made.append(place)
        return Member(place, Actor())


class Ranks:
    noun = "rank"

    def __init__(self) -> None:
        self.members = [Member(0, Actor(), fresh=False), Member(1, Actor(), fresh=False)]
        self.replaced: list[int] = []

    def replace(self, number: int) -> None:
        self.replaced.append(self.members[number].place)


@pytest.fixture
def cluster(monkeypatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(nodes, "_dead_nodes", lambda: set(made.dead))
    monkeypatch.setattr(nodes, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(nodes, "_SPARE_SECONDS", 0.01)
    monkeypatch.setattr(nodes, "_VERDICT_SECONDS", 0.05)
    monkeypatch.setattr(left_behind, "_BEAT_SECONDS", 0.001)
    monkeypatch.setattr(left_behind, "kill", lambda actor: None)
    return made


def run_of(*, min_ranks: int | None = None, wait: float = 0.02) -> SimpleNamespace:
    said: list[tuple] = []
    return SimpleNamespace(
        workers=SimpleNamespace(ranks=Ranks()),
        config=SimpleNamespace(recovery=SimpleNamespace(min_ranks=min_ranks, node_wait_seconds=wait)),
        said=said,
        say=lambda kind, text, **fields: said.append((kind, text, fields)),
        phase=lambda name: None,
    )


def unreachable() -> WorkerLost:
    fault = WorkerLost("rank 1 died").of("rank 1")
    fault.__cause__ = ActorUnavailableError("no connection", None)
    return fault


def left(cluster: Cluster, table: Nodes, again: bool = True) -> LeftBehind:
    async def on_fault(place, fault):
        return again

    return LeftBehind(cluster, table, on_fault, 1.0)


async def until(what) -> None:
    async with asyncio.timeout(5):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_a_death_on_a_living_node_is_not_waited_for(cluster):
    assert asyncio.run(Nodes(cluster).lost_under(("rank", 1), WorkerLost("died"))) is None


def test_an_unreachable_worker_waits_for_what_ray_says_about_its_node(cluster):
    async def play():
        table = Nodes(cluster)
        verdict = asyncio.create_task(table.lost_under(("rank", 1), unreachable()))
        await asyncio.sleep(0.01)
        assert not verdict.done()
        cluster.dead.add("B")
        assert await verdict == "B"
        assert await table.lost_under(("engine", 0), unreachable()) is None
        assert await table.lost_lately()

    asyncio.run(play())


def test_nodes_that_were_dead_before_explain_nothing(cluster):
    cluster.dead.add("Z")
    assert not asyncio.run(Nodes(cluster).lost_lately())


def test_a_rank_whose_bundle_moved_to_a_spare_node_is_made_again_there(cluster):
    async def play():
        table, run = Nodes(cluster), run_of()
        cluster.dead.add("B")
        cluster.bundles[1] = "C"
        await seat_ranks(run, cluster, table, left(cluster, table))
        assert run.workers.ranks.replaced == [1]
        assert table.where["rank", 1] == "C"
        assert run.said == []

    asyncio.run(play())


def test_with_min_ranks_the_others_go_on_and_the_missing_one_returns_when_its_bundle_has_a_node(cluster):
    async def play():
        table, run = Nodes(cluster), run_of(min_ranks=1)
        absent = left(cluster, table)
        cluster.dead.add("A")
        await seat_ranks(run, cluster, table, absent)
        assert [member.place for member in run.workers.ranks.members] == [1]
        assert [kind for kind, *_ in run.said] == ["smaller"]
        await asyncio.sleep(0.01)
        assert cluster.made == []  # nothing is started where there is no node
        cluster.bundles[0] = "C"
        await until(lambda: absent.ready)
        (back,) = absent.take()
        assert (back.place, table.where["rank", 0], len(absent)) == (0, "C", 0)
        await absent.stop()

    asyncio.run(play())


def test_a_returning_rank_that_dies_is_made_again_or_given_up(cluster):
    async def play(again: bool) -> int:
        table = Nodes(cluster)
        absent = left(cluster, table, again)
        absent.leave(Member(1, Actor()))
        await until(lambda: absent.ready)
        first = absent.ready[1]
        first.actor.alive = False
        await until(lambda: absent.ready.get(1) not in (None, first) if again else not absent.ready)
        await absent.stop()
        made, cluster.made = len(cluster.made), []
        return made

    assert asyncio.run(play(again=True)) == 2
    assert asyncio.run(play(again=False)) == 1


@pytest.mark.parametrize("fewest", [None, 2])
def test_else_a_node_is_waited_for_until_the_deadline(cluster, fewest):
    async def play():
        table, run = Nodes(cluster), run_of(min_ranks=fewest)
        cluster.dead.add("B")
        with pytest.raises(NodesMissing, match="no node came for rank 1"):
            await seat_ranks(run, cluster, table, left(cluster, table))
        ((kind, text, fields),) = run.said
        assert (kind, fields["ranks"], fields["seconds"]) == ("waiting", [1], 0.02)
        assert "recovery.node_wait_seconds" in text

    asyncio.run(play())
