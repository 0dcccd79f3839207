"""Probes on the nodes of a table in place of Ray's: they tell, and whatever is wrong with them harms nobody."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from argusrl.cluster.node_probe import Reading
from argusrl.errors import WorkerLost
from argusrl.journal.node_reports import read_node_reports
from argusrl.storage.layout import RunFolder
from argusrl.training import probing
from argusrl.training.probing import Probes


class Actor:
    """The probe of one pod."""

    def __init__(self, pod: str, clock_ahead: float = 0.0) -> None:
        self.pod, self.clock_ahead = pod, clock_ahead
        self.fault: Exception | None = None
        self.hangs = False  # when it is read
        self.copies_for_ever = False
        self.kept: list = []
        self.said: list[str] = []

    async def _read(self) -> Reading:
        if self.hangs:
            await asyncio.sleep(60)
        if self.fault:
            raise self.fault
        return Reading(time=time.time() + self.clock_ahead, pod=self.pod, node=f"node-of-{self.pod}")

    async def _keep(self, folder, most_bytes: int) -> int:
        self.kept.append((folder.name, most_bytes))
        if self.copies_for_ever:
            await asyncio.sleep(60)
        return most_bytes

    async def _leave(self) -> bool:
        return True

    async def _report(self, quiet_seconds: float, start_seconds: float) -> str:
        self.said.append(f"hang after {quiet_seconds:g} s, {start_seconds:g} s at the start")
        return "configured"

    async def _progress(self, line: str) -> None:
        self.said.append(line)

    def __getattr__(self, name: str):
        methods = {"read": self._read, "keep_logs": self._keep, "leave": self._leave}
        methods |= {"report_hangs": self._report, "progress": self._progress}
        return SimpleNamespace(remote=methods[name])


@pytest.fixture
def cluster(monkeypatch):
    """Nodes by id; each one's probe is made when it is found."""
    made = SimpleNamespace(nodes={}, actors={}, count=0, killed=[])

    def table():
        return [
            {"NodeID": node, "Alive": alive, "NodeManagerAddress": "10.0.0.1", "Resources": resources}
            for node, (alive, resources) in made.nodes.items()
        ]

    def make(self, node):
        made.count += 1
        return made.actors.setdefault(node, Actor(f"pod-{node}"))

    monkeypatch.setattr(probing.ray, "nodes", table)
    monkeypatch.setattr(Probes, "_make", make)
    monkeypatch.setattr(probing, "kill", made.killed.append)
    monkeypatch.setattr(probing, "_LOOK_SECONDS", 0.002)
    monkeypatch.setattr(probing, "_ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(probing, "_ROUND_SECONDS", 0.01)
    made.join = lambda node, **resources: made.nodes.__setitem__(node, (True, resources))
    made.lose = lambda node: made.nodes.__setitem__(node, (False, {}))
    return made


def play(tmp_path, scenario, **settings):
    async def run():
        probes = Probes(RunFolder(tmp_path), 1, tmp_path / "logs", {}, **settings)
        probes.start()
        async with asyncio.timeout(10):
            await scenario(probes)
            await probes.stop()

    (tmp_path / "attempts" / "001").mkdir(parents=True)
    asyncio.run(run())
    return {report.ray_node: report for report in read_node_reports(RunFolder(tmp_path), 1)}


async def until(what) -> None:
    while not what():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def test_every_node_has_a_report_and_a_pod_is_found_by_its_name(cluster, tmp_path):
    async def scenario(probes):
        cluster.join("h", **{"node:__internal_head__": 1.0})
        cluster.join("a")
        assert await probes.node_of("pod-a", 5) == "a"
        assert await probes.node_of("pod-h", 5) == "h"
        assert await probes.node_of("pod-x", 0.01) is None
        late = asyncio.create_task(probes.node_of("pod-b", 5))
        cluster.join("b")
        assert await late == "b"

    reports = play(tmp_path, scenario)
    assert {node: (one.pod, one.head, one.alive) for node, one in reports.items()} == {
        "h": ("pod-h", True, True),
        "a": ("pod-a", False, True),
        "b": ("pod-b", False, True),
    }
    assert len(cluster.killed) == 3


def test_a_node_that_is_gone_stays_in_the_report_and_is_not_found(cluster, tmp_path):
    async def scenario(probes):
        cluster.join("a")
        assert await probes.node_of("pod-a", 5) == "a"
        cluster.lose("a")
        await until(lambda: probes.known("pod-a") is None)
        assert await probes.leave("a") is False

    report = play(tmp_path, scenario)["a"]
    assert (report.pod, report.alive) == ("pod-a", False)


def test_a_probe_that_dies_is_made_again_later(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(probing, "_AGAIN_SECONDS", 0.02)

    async def scenario(probes):
        cluster.join("a")
        await until(lambda: probes.known("pod-a"))
        cluster.actors["a"].fault = WorkerLost("it died")
        await until(lambda: cluster.count > 1)
        cluster.actors["a"].fault = None
        seen = probes._probes["a"].reading.time
        await until(lambda: probes._probes["a"].reading.time > seen)

    assert play(tmp_path, scenario)["a"].alive


def test_a_probe_that_hangs_is_waited_for_no_longer_than_its_deadline(cluster, tmp_path):
    async def scenario(probes):
        cluster.join("a")
        cluster.join("b")
        await until(lambda: probes.known("pod-a") and probes.known("pod-b"))
        cluster.actors["b"].hangs = True
        seen = probes._probes["a"].reading.time
        await until(lambda: probes._probes["a"].reading.time > seen)

    assert play(tmp_path, scenario)["b"].pod == "pod-b"


def test_the_clock_of_a_node_is_compared_with_the_drivers(cluster, tmp_path):
    async def scenario(probes):
        cluster.join("a")
        cluster.actors["a"] = Actor("pod-a", clock_ahead=7.0)
        await until(lambda: probes.known("pod-a"))

    (found,) = play(tmp_path, scenario)["a"].findings
    assert (found.kind, found.text) == ("clock", "its clock is +7.0 s from the driver's")


def test_logs_are_kept_by_pod_and_within_a_bound_for_all_nodes(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(probing, "_LOGS_BYTES", 100)
    monkeypatch.setattr(probing, "_ALL_LOGS_BYTES", 120)

    async def scenario(probes):
        cluster.join("a")
        cluster.join("b")
        await until(lambda: probes.known("pod-a") and probes.known("pod-b"))
        await probes.keep_logs_of("a")
        assert cluster.actors["a"].kept == [("pod-a", 60)]

    play(tmp_path, scenario)
    assert cluster.actors["b"].kept == [("pod-b", 60)]  # at the end of the attempt


def test_a_probe_that_still_copies_logs_is_not_asked_again(cluster, tmp_path):
    async def scenario(probes):
        cluster.join("a")
        await until(lambda: probes.known("pod-a"))
        cluster.actors["a"].copies_for_ever = True
        for _ in range(3):
            await probes.keep_logs_of("a")
        assert len(cluster.actors["a"].kept) == 1

    play(tmp_path, scenario)


def test_a_node_that_died_before_its_probe_answered_does_not_make_the_others_busy(cluster, tmp_path):
    async def scenario(probes):
        cluster.join("a")
        await until(lambda: probes.known("pod-a"))
        cluster.actors["b"] = Actor("pod-b")
        cluster.actors["b"].hangs = True
        cluster.join("b")
        await until(lambda: "b" in probes._probes)
        cluster.lose("b")
        await until(lambda: not probes._probes["b"].alive)
        assert not any(map(probing._starts, probes._answering()))

    play(tmp_path, scenario)


def test_one_worker_node_repeats_what_the_run_does_and_another_one_takes_over(cluster, tmp_path):
    lines = ["step 1"]

    async def scenario(probes):
        cluster.join("h", **{"node:__internal_head__": 1.0})
        cluster.join("a")
        cluster.actors["a"] = first = Actor("pod-a")
        cluster.actors["h"] = head = Actor("pod-h")
        await until(lambda: first.said)
        assert first.said[0] == "hang after 1800 s, 600 s at the start"
        await until(lambda: first.said[-1] == "step 1")
        lines[0] = "step 2"
        await until(lambda: first.said[-1] == "step 2")
        assert (len(first.said), head.said) == (3, [])
        cluster.lose("a")
        await until(lambda: head.said)  # better than none
        await until(lambda: head.said[-1] == "step 2")

    play(tmp_path, scenario, progress=lambda: lines[0], hang_seconds=(1800.0, 600.0))
    assert cluster.actors["h"].said[-1] == "argusrl ends: attempt 1"
