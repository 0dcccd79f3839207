from __future__ import annotations

from typing import Any

import pytest

from argusrl.cluster.waiting import scheduling_reasons, waiting_pods, waiting_quota


def pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "w"}, "spec": {}, "status": {"phase": "Pending", **status}}


def unplaced(message: str) -> dict[str, Any]:
    return pod(conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}])


def container(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    return {"name": "ray", "image": "argusrl:1", "state": {"waiting": {"reason": reason, "message": message}}, **more}


def event(reason: str, message: str, at: str = "2026-11-30T10:00:00Z") -> dict[str, Any]:
    about = {"kind": "Pod", "name": "w"}
    return {"metadata": {}, "involvedObject": about, "reason": reason, "message": message, "lastTimestamp": at}


@pytest.mark.parametrize(
    ("message", "kinds", "hint"),
    [
        ("0/5 nodes are available: 5 Insufficient nvidia.com/gpu.", ["capacity"], "GPUs"),
        ("0/5 nodes are available: 5 Insufficient vpc.amazonaws.com/efa.", ["capacity"], "EFA"),
        ("0/2 nodes are available: 2 Insufficient memory.", ["capacity"], "93 %"),
        (
            "0/3 nodes are available: 3 node(s) had untolerated taint {sagemaker.amazonaws.com/node-health-status: "
            "Unschedulable}. preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling.",
            ["taint"],
            "HyperPod checks, reboots or replaces",
        ),
        ("0/3 nodes are available: 3 node(s) had untolerated taint {team: other}.", ["taint"], "kept for others"),
        ("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.", ["selector"], "labels"),
        ("0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.", ["volume"], "not bound"),
        ('0/3 nodes are available: persistentvolumeclaim "fsx" not found.', ["volume"], "claim"),
        ("0/3 nodes are available: 3 node(s) had volume node affinity conflict.", ["volume"], "availability zone"),
        ("0/1 nodes are available: something new.", ["capacity"], ""),
    ],
)
def test_the_schedulers_words(message: str, kinds: list[str], hint: str) -> None:
    found = waiting_pods([unplaced(message)])
    assert [one.kind for one in found] == kinds
    assert found[0].text.startswith("0/")
    assert "preemption" not in found[0].text
    assert hint in found[0].hint


def test_several_causes_are_told_apart() -> None:
    text = (
        "0/6 nodes are available: 1 node(s) had untolerated taint {sagemaker.amazonaws.com/node-health-status: "
        "Unschedulable}, 2 Insufficient nvidia.com/gpu, 3 node(s) didn't match Pod's node affinity/selector."
    )
    found = scheduling_reasons("w", text)
    assert [one.kind for one in found] == ["capacity", "taint", "selector"]
    assert [bool(one.text) for one in found] == [True, False, False]


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (container("ImagePullBackOff", "Back-off pulling"), "image", "argusrl:1 cannot be pulled: Back-off pulling"),
        (container("CreateContainerConfigError", 'secret "hub" not found'), "secret", 'secret "hub" not found'),
        (
            container("CrashLoopBackOff", lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
            "crash",
            "exit code 137 (OOMKilled)",
        ),
    ],
)
def test_containers_that_cannot_start(status: dict[str, Any], kind: str, text: str) -> None:
    (found,) = waiting_pods([pod(containerStatuses=[status])])
    assert found.kind == kind
    assert text in found.text


def test_mounts_show_in_events_alone() -> None:
    placed = pod(conditions=[{"type": "PodScheduled", "status": "True"}])
    placed["spec"]["nodeName"] = "n1"
    (starting,) = waiting_pods([placed])
    assert (starting.kind, "n1" in starting.text) == ("start", True)
    old = event("FailedMount", "old", "2026-11-30T09:00:00Z")
    (found,) = waiting_pods([placed], [event("FailedMount", "MountVolume.SetUp failed"), old, event("Pulled", "x")])
    assert (found.kind, found.text) == ("volume", "MountVolume.SetUp failed")
    assert "988" in found.hint


def test_an_event_stands_in_for_a_condition_that_is_not_there_yet() -> None:
    (found,) = waiting_pods([pod()], [event("FailedScheduling", "0/1 nodes are available: 1 Insufficient cpu.")])
    assert found.kind == "capacity"


def test_pods_that_run_or_go_wait_for_nothing() -> None:
    going = pod()
    going["metadata"]["deletionTimestamp"] = "2026-11-30T10:00:00Z"
    assert waiting_pods([pod(phase="Running"), pod(phase="Failed"), going]) == []


def job(queue: str | None = "team-queue", suspend: bool = True) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    return {"metadata": {"name": "maze-s1", "uid": "u", "labels": labels}, "spec": {"suspend": suspend}}


def workload(**condition: str) -> dict[str, Any]:
    meta = {"name": "x", "ownerReferences": [{"uid": "u"}]}
    return {"metadata": meta, "status": {"conditions": [condition]}}


def test_quota_is_waited_for() -> None:
    reason = workload(type="QuotaReserved", status="False", reason="Pending", message="insufficient quota for gpu")
    found = waiting_quota(job(), [reason])
    assert found is not None
    assert "queue team-queue has not admitted it (Pending: insufficient quota for gpu)" in found.text
    preempted = workload(type="Evicted", status="True", reason="Preempted", message="by another workload")
    found = waiting_quota(job(), [preempted])
    assert found is not None
    assert "Preempted: by another workload" in found.text


def test_a_hand_that_suspended_it_is_not_kueue() -> None:
    found = waiting_quota(job(queue=None), [])
    assert found is not None
    assert "by hand" in found.text
    assert waiting_quota(job(suspend=False), []) is None
