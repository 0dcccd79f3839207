"""Nodes are left on purpose while a run trains on them: raylets with the environment of pods."""

from __future__ import annotations

import os
import subprocess

import pytest

from argusrl.journal.drains import DRAIN_SECONDS, read_drain, read_drained
from argusrl.journal.node_reports import read_node_reports
from argusrl.journal.verify import verify_run
from e2e.cluster_of_raylets import Node, RayletCluster
from e2e.conftest import ROOT, command
from e2e.run_on_raylets import Training, actors_on, head_store_bytes, training

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
ALL = os.environ.get("ARGUSRL_FAULTS") == "all"
LONG = ["algorithm.prompts_per_step=16", "algorithm.group_size=8"]  # a rollout of seconds


def pod(cluster: RayletCluster, name: str) -> Node:
    return cluster.add(POD_NAME=name, NODE_NAME=f"hyperpod-i-{name}")


def hook(run: Training, name: str) -> subprocess.CompletedProcess[str]:
    """What the preStop hook of a pod runs."""
    variables = {"POD_NAME": name, "NODE_NAME": f"hyperpod-i-{name}", "ARGUSRL_RUN_FOLDER": str(run.folder.path)}
    words = command("drain", "--wait", "--reason", "a test")
    environment = {**os.environ, **variables}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_node_is_left_in_good_order_and_the_run_goes_on_without_a_fault(tmp_path):
    with RayletCluster() as cluster:
        pod(cluster, "a")
        going = pod(cluster, "b")
        with training(cluster, tmp_path, "run", "recovery.min_ranks=1", *LONG) as run:
            run.until(lambda: run.step() >= 1)
            assert sorted(actors_on(cluster).pop("head")) == ["ProbeWorker"]  # the driver is no actor
            assert head_store_bytes(cluster) < 1000  # no adapter has passed through it: one is hundreds of kilobytes
            done = hook(run, "b")
            assert done.returncode == 0, done.stdout + done.stderr
            assert "b: drained after" in done.stdout
            assert (read_drain(run.folder, "b").node, read_drain(run.folder, "b").asked_by) == ("hyperpod-i-b", "hook")
            assert read_drained(run.folder, "b").seconds < DRAIN_SECONDS
            run.until(lambda: going.process.poll() is not None)  # `ray start` of the pod ended by itself
            run.until(lambda: run.events("smaller"))
            run.commits(2)
            resumed = run.events("resumed")[-1]
            assert resumed["checkpoint"] == resumed["step"]  # the state was kept: no update is repeated
            pod(cluster, "c")
            run.until(lambda: run.events("larger"))
            run.commits(2)
            assert run.stop() == 75
            assert run.events("fault") == []
            assert run.events("recovered") == []
            assert {1, 2} == set(run.ranks())
            reports = {report.pod: report for report in read_node_reports(run.folder, 1)}
            assert (reports["a"].alive, reports["b"].alive, reports["c"].alive) == (True, False, True)
            assert reports[""].head
            kept = {path.name for path in (run.folder.attempt(1) / "logs" / "nodes").iterdir()}
            assert {"a", "b", "c"} <= kept
        assert verify_run(run.folder) == []


@pytest.mark.skipif(not ALL, reason="make test-faults")
def test_with_a_spare_node_the_run_moves_there_and_never_gets_smaller(tmp_path):
    with RayletCluster() as cluster:
        pod(cluster, "a")
        pod(cluster, "b")
        with training(cluster, tmp_path, "run", "recovery.min_ranks=1") as run:
            run.until(lambda: run.step() >= 1)
            pod(cluster, "spare")
            run.until(lambda: "spare" in {report.pod for report in read_node_reports(run.folder, 1)})
            assert hook(run, "b").returncode == 0
            run.commits(3)
            assert run.stop() == 75
            assert set(run.ranks()) == {2}
            assert run.events("fault") == []
        assert verify_run(run.folder) == []


@pytest.mark.skipif(not ALL, reason="make test-faults")
def test_the_only_node_is_left_and_its_replacement_is_waited_for(tmp_path):
    with RayletCluster() as cluster:
        pod(cluster, "a")
        with training(cluster, tmp_path, "run", "cluster.slots=1", *LONG) as run:
            run.until(lambda: run.step() >= 1)
            assert hook(run, "a").returncode == 0
            run.until(lambda: run.events("waiting"))
            pod(cluster, "b")
            run.commits(2)
            assert run.stop() == 75
            assert run.events("fault") == []
        assert verify_run(run.folder) == []
