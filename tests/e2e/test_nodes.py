"""Nodes are lost and added while a run goes on, on a real Ray cluster of several raylets."""

from __future__ import annotations

import os
import signal
import time

import pytest

from argusrl.journal.commits import CommitChain
from argusrl.journal.verify import verify_run
from argusrl.observe.events import event_seconds
from e2e.cluster_of_raylets import RayletCluster
from e2e.run_on_raylets import cluster_of, left_on, phases, training

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
ALL = os.environ.get("ARGUSRL_FAULTS") == "all"


@pytest.mark.skipif(not ALL, reason="make test-faults")
def test_a_run_shrinks_and_grows_with_its_nodes_and_replays_on_any_number_of_ranks(tmp_path):
    """2 ranks, 1 rank, 2 ranks; then supervisor and driver are killed, and 1 rank, and 2, replay all of it exactly."""
    with cluster_of(2) as cluster:
        with training(cluster, tmp_path, "run", "recovery.min_ranks=1") as run:
            run.until(lambda: run.step() >= 2)
            lost_at = time.time()
            cluster.nodes[-1].lose()
            run.until(lambda: run.events("smaller"))
            faults = run.events("fault")
            assert {fault["fault"] for fault in faults} == {"node"}
            run.commits(2)
            cluster.add()
            run.until(lambda: run.events("larger"))
            run.commits(2)
            run.until(lambda: [e for e in run.events("healed") if e["member"].startswith("engine")])
            run.kill()
        ranks = run.ranks()
        assert sorted(set(ranks)) == [1, 2]
        assert ranks[0] == ranks[-1] == 2
        for slots in (1, 2):
            with training(cluster, tmp_path, "run", f"cluster.slots={slots}") as again:
                again.commits(2)
                assert again.stop() == 75
            assert again.ranks()[-1] == slots
            assert left_on(cluster) == {"actors": [], "groups": []}
        assert not run.events("replay_inexact")
        assert len(run.events("resumed")) >= 4
        assert verify_run(run.folder) == []
        assert event_seconds(faults[0]) - lost_at < 5.0 + 1.0  # found within 5 s, to the second


def test_without_a_least_number_of_ranks_it_waits_for_a_node(tmp_path):
    with cluster_of(2) as cluster, training(cluster, tmp_path, "run") as run:
        run.until(lambda: run.step() >= 1)
        cluster.nodes[-1].lose()
        run.until(lambda: run.events("waiting"))
        (waiting,) = run.events("waiting")
        assert waiting["seconds"] == 1800
        assert "recovery.node_wait_seconds" in waiting["message"]
        cluster.add()
        run.commits(2)
        assert run.stop() == 75
        assert set(run.ranks()) == {2}
        assert {fault["fault"] for fault in run.events("fault")} == {"node"}
        assert verify_run(run.folder) == []


def test_no_node_within_the_deadline_is_a_clear_end(tmp_path):
    with cluster_of(2) as cluster, training(cluster, tmp_path, "run", "recovery.node_wait_seconds=3") as run:
        run.until(lambda: run.step() >= 1)
        cluster.nodes[-1].lose()
        assert run.process.wait(timeout=60) == 7
        assert "no node came for rank" in run.output.read_text()
        assert len(list(run.folder.attempts.glob("*/verdict.json"))) == 1  # trying again would only wait again
        assert left_on(cluster) == {"actors": [], "groups": []}
        assert verify_run(run.folder) == []


@pytest.mark.skipif(not ALL, reason="make test-faults")
@pytest.mark.parametrize("phase", ["rollout", "train"])
@pytest.mark.parametrize("hung", [False, True], ids=["lost", "hung"])
def test_a_node_goes_in_any_phase(tmp_path, phase, hung):
    long = ["algorithm.prompts_per_step=32", "algorithm.group_size=8"]
    with cluster_of(2) as cluster, training(cluster, tmp_path, "run", "recovery.min_ranks=1", *long) as run:
        run.until(lambda: run.step() >= 1)
        run.until(lambda: phases(run)[-1]["phase"] == phase)
        node = cluster.nodes[-1]
        node.signal(signal.SIGSTOP) if hung else node.lose()
        run.until(lambda: run.events("smaller"))
        run.commits(2)
        assert run.ranks()[-1] == 1
        assert {fault["fault"] for fault in run.events("fault")} <= {"node", "episode_worker"}
        assert run.stop() == 75
        assert verify_run(run.folder) == []


@pytest.mark.skipif(not ALL, reason="make test-faults")
def test_what_three_ranks_did_two_cannot_repeat_exactly_and_the_commit_wins(tmp_path):
    apart = ["cluster.colocate=false", "cluster.engines=1"]
    with RayletCluster() as cluster:
        cluster.add(cpus=4)
        with training(cluster, tmp_path, "run", "cluster.slots=4", *apart) as run:
            run.until(lambda: run.step() >= 2)
            run.kill()
        committed = run.head()
        with training(cluster, tmp_path, "run", "cluster.slots=3", *apart) as again:
            again.commits(1)
            assert again.stop() == 75
        (inexact,) = again.events("replay_inexact")
        assert inexact["step"] == committed.step
        assert inexact["weight_difference"] > 0
        assert 0 <= inexact["logprob_difference"] <= inexact["tolerance"]
        assert inexact["verdict"] == "within"
        assert CommitChain(run.folder).read(committed.step) == committed
        assert verify_run(run.folder) == []
