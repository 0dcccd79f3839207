from __future__ import annotations

import pytest

from argusrl.cluster.pod_ends import PodEnds
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import read_lines
from fakes.kubernetes_api import MemoryKube, Store


def pod(name: str, **status) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-{name}"},
        "spec": {"nodeName": "hyperpod-i-1", "containers": []},
        "status": {"phase": "Running", **status},
    }


def killed(restarts: int, state: str = "lastState") -> dict:
    over = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2026-11-30T12:00:00Z"}
    return {"name": "ray-worker", "restartCount": restarts, state: {"terminated": over}}


@pytest.fixture
def ends(tmp_path) -> PodEnds:
    run = RunFolder(tmp_path)
    (run.attempt(1) / "logs").mkdir(parents=True)
    store = Store(schemas=None)
    store.seed(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "e1", "namespace": "default"},
            "involvedObject": {"kind": "Pod", "name": "w1"},
            "reason": "BackOff",
            "message": "restarting failed container",
            "count": 4,
            "lastTimestamp": "2026-11-30T12:00:01Z",
        }
    )
    return PodEnds(run, MemoryKube(store), wall=lambda: 5.0)


def kept(ends: PodEnds) -> list[dict]:
    return read_lines(ends.run.attempt(1) / "logs" / "pods.jsonl")


def test_a_container_that_ended_is_kept_once_with_the_events_of_its_pod(ends):
    for _ in range(2):
        ends.look(1, [pod("w1", containerStatuses=[killed(1)])])
    (line,) = kept(ends)
    assert (line["pod"], line["reason"], line["exit_code"], line["node"]) == ("w1", "OOMKilled", 137, "hyperpod-i-1")
    assert line["events"][0]["reason"] == "BackOff"
    ends.look(1, [pod("w1", containerStatuses=[killed(2)])])  # it ended again
    assert len(kept(ends)) == 2


def test_a_second_controller_finds_what_the_first_one_kept(ends):
    ends.look(1, [pod("w1", containerStatuses=[killed(0, "state")])])
    PodEnds(ends.run, ends.kube).look(1, [pod("w1", containerStatuses=[killed(0, "state")])])
    assert len(kept(ends)) == 1


def test_evicted_pods_and_pods_that_vanish_are_kept_and_those_that_are_done_are_not(ends):
    done = {"name": "stage-weights", "restartCount": 0, "state": {"terminated": {"reason": "Completed", "exitCode": 0}}}
    ends.look(1, [pod("w1", phase="Failed", reason="Evicted", message="low on memory"), pod("w2")])
    ends.look(1, [pod("w3", initContainerStatuses=[done])])
    assert [(line["pod"], line["reason"]) for line in kept(ends)] == [
        ("w1", "Evicted"),
        ("w1", "gone"),
        ("w2", "gone"),
    ]


def test_before_there_is_an_attempt_nothing_is_kept(ends):
    ends.look(0, [pod("w1", containerStatuses=[killed(1)])])
    ends.look(2, [pod("w1", containerStatuses=[killed(1)])])
    assert kept(ends) == []
    assert not ends.run.attempt(2).exists()  # making it is for the supervisor alone
