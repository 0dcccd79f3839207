"""A run on Kubernetes loses a node, and its head, with real training in between.

The API server is the one of the tests, spoken to by the real client; pods are raylets (pods_as_raylets.py); the
controller is the real command. HyperPod only labels and replaces nodes.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import pytest

from argusrl.journal.attempts import read_verdict
from argusrl.journal.commits import CommitChain
from argusrl.journal.drains import DRAIN_SECONDS
from argusrl.journal.submissions import submissions
from argusrl.journal.verify import verify_run
from argusrl.observe.events import event_seconds
from e2e.on_kubernetes import on_kubernetes

pytestmark = [
    pytest.mark.ray,
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.environ.get("ARGUSRL_FAULTS") != "all", reason="make test-faults"),
]


def test_label_drain_loss_replacement_and_the_run_goes_on(tmp_path):
    with on_kubernetes(tmp_path) as run:
        run.until(lambda: run.step() >= 2)
        node = run.pods.node_of(head=False)
        labelled = time.time()
        run.pods.label(node)
        run.until(run.drained)
        (answer,) = run.drained()
        assert answer.outcome == "drained"
        assert answer.time - labelled < DRAIN_SECONDS
        run.until(lambda: node in run.pods.lost)
        run.until(lambda: run.events("larger"))
        replaced = time.time()
        run.commits(2)
        assert CommitChain(run.folder).read(run.step()).conditions["ranks"] == 2
        assert run.events("fault") == []
        assert len(submissions(run.folder)) == 1
        report(
            label_to_answer=answer.time - labelled,
            driver_seconds=answer.seconds,
            loss_to_two_ranks=replaced - run.pods.lost[node],
        )
    assert verify_run(run.folder) == []


def test_the_head_dies_and_the_run_is_fenced_submitted_again_and_resumes_from_storage(tmp_path):
    with on_kubernetes(tmp_path, "cluster.slots=1", "cluster.kubernetes.workers.nodes=1") as run:
        run.until(lambda: run.step() >= 2)
        committed = run.step()
        lost = time.time()
        run.pods.lose(run.pods.node_of(head=True))
        run.until(lambda: len(submissions(run.folder)) == 2)
        run.until(lambda: run.submitted()[-1]["submission"] == 2)
        resubmitted = run.submitted()[-1]
        run.until(lambda: run.step() > committed)
        resumed = CommitChain(run.folder).read(committed + 1)
        assert resubmitted["reason"] == "head_lost"
        assert resubmitted["time"] - lost < 60.0
        assert resumed.epoch > CommitChain(run.folder).read(committed).epoch
        run.commits(1)
        report(
            loss_to_resubmission=resubmitted["time"] - lost,
            parts=resubmitted["seconds"],
            loss_to_resumed=event_seconds(run.events("resumed")[-1]) - lost,
        )
    assert verify_run(run.folder) == []


def test_the_head_is_evicted_and_everything_is_sealed_before_it_goes(tmp_path):
    with on_kubernetes(tmp_path, "cluster.slots=1", "cluster.kubernetes.workers.nodes=1") as run:
        run.until(lambda: run.step() >= 2)
        evicted = time.time()
        run.pods.evict(head=True)
        run.until(lambda: run.submitted()[-1]["submission"] == 2)
        again = run.submitted()[-1]
        assert again["reason"] == "interrupted"
        assert again["time"] - evicted < DRAIN_SECONDS
        verdict = read_verdict(run.folder, 1)
        assert verdict is not None
        assert verdict.exit_code == 75
        run.commits(1)
        assert run.events("fault") == []
        report(eviction_to_resubmission=again["time"] - evicted)
    assert verify_run(run.folder) == []


def report(**seconds: Any) -> None:
    """For whoever measures: shown by pytest -s."""
    print(json.dumps(seconds))
