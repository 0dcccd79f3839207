"""What is created again, and how objects are read."""

from __future__ import annotations

import pytest

from argusrl.cluster.kinds import NAMESPACE, SERVICE_ACCOUNT
from argusrl.cluster.kube_api import Object
from argusrl.cluster.numbering import remembered_number
from argusrl.cluster.sighting import (
    gpus_of,
    head_of,
    is_admitted,
    is_live,
    job_of,
    mark_of,
    seconds_of,
    submission_of,
    unschedulable,
)
from argusrl.cluster.targets import RayJobTarget, cluster_job, next_manifest, recorded_manifest
from argusrl.errors import ClusterError
from argusrl.journal.submissions import Submission
from fakes.kubernetes_api import MemoryKube, Store


def ray_job(status: str = "", *, suspend: bool | None = None, deleting: bool = False) -> Object:
    metadata: Object = {
        "name": "maze-s1",
        "namespace": "team",
        "uid": "u",
        "resourceVersion": "7",
        "labels": {"argusrl.io/submission": "1", "kueue.x-k8s.io/queue-name": "q"},
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "argusrl.io/run-folder": "/fsx/maze"},
    }
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    template = {"metadata": {"labels": {"argusrl.io/submission": "1"}}, "spec": {"containers": []}}
    spec: Object = {
        "entrypoint": "argusrl train r.yaml",
        "jobId": "maze-s1",
        "rayClusterSpec": {"headGroupSpec": {"template": template}, "workerGroupSpecs": []},
    }
    if suspend is not None:
        spec["suspend"] = suspend
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata,
        "spec": spec,
        "status": {"jobDeploymentStatus": status} if status else {},
    }


@pytest.mark.parametrize(
    ("status", "job", "live"),
    [
        ("", "starting", True),
        ("Initializing", "starting", True),
        ("Waiting", "starting", True),
        ("Running", "running", True),
        ("Retrying", "retrying", True),
        ("Suspending", "suspended", True),
        ("Suspended", "suspended", True),
        ("Complete", "complete", False),
        ("Failed", "failed", False),
        ("ValidationFailed", "invalid", False),
        ("SomethingNew", "unknown", True),
    ],
)
def test_how_a_job_stands(status, job, live):
    assert job_of(ray_job(status)) == job
    assert is_live(ray_job(status)) == live


def test_a_job_that_is_being_deleted_is_not_alive():
    assert job_of(ray_job("Running", deleting=True)) == "deleting"
    assert not is_live(ray_job("Running", deleting=True))


@pytest.mark.parametrize(
    ("status", "suspend", "admitted"),
    [
        ("", True, False),
        ("Running", True, False),  # Kueue has taken the quota; KubeRay has not followed yet
        ("Suspended", False, False),  # admitted again; KubeRay has not followed yet
        ("Initializing", False, True),
        ("Running", None, True),
        ("Failed", True, True),  # it waits for nothing any more
    ],
)
def test_whether_kueue_keeps_it_back(status, suspend, admitted):
    assert is_admitted(ray_job(status, suspend=suspend)) == admitted


def test_what_is_recorded_can_be_created_again():
    manifest = recorded_manifest(ray_job("Running", suspend=False))
    assert "status" not in manifest
    assert "suspend" not in manifest["spec"]
    assert set(manifest["metadata"]) == {"name", "namespace", "labels", "annotations"}
    assert manifest["metadata"]["annotations"] == {"argusrl.io/run-folder": "/fsx/maze"}


def test_the_next_one_has_its_own_name_and_number_everywhere():
    manifest = recorded_manifest(ray_job("Running"))
    document = next_manifest(manifest, "maze", 4)
    assert document["metadata"]["name"] == document["spec"]["jobId"] == "maze-s4"
    assert submission_of(document) == 4
    template = document["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert template["metadata"]["labels"] == {"argusrl.io/submission": "4"}
    assert document["metadata"]["annotations"]["argusrl.io/submitted-by"] == "controller"
    assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert submission_of(manifest) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runtime_env": {}}', '{"entrypoint": "e", "runtime_env": 3}'])
def test_an_annotation_that_describes_no_job(text):
    with pytest.raises(ClusterError, match=r"argusrl\.io/job"):
        cluster_job({"metadata": {"name": "ray", "annotations": {"argusrl.io/job": text}}})


def pod(kind: str = "head", phase: str = "Running", *, leaving: bool = False, restarts: int = 0) -> Object:
    metadata: Object = {"name": f"{kind}-{phase}", "uid": "p", "labels": {"ray.io/node-type": kind}}
    if leaving:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {"metadata": metadata, "status": {"phase": phase, "containerStatuses": [{"restartCount": restarts}]}}


@pytest.mark.parametrize(
    ("pods", "head"),
    [
        ([], "none"),
        ([pod("worker")], "none"),
        ([pod()], "running"),
        ([pod(phase="Pending")], "pending"),
        ([pod(phase="Failed")], "ended"),
        ([pod(phase="Succeeded", leaving=True)], "ended"),
        ([pod(leaving=True)], "leaving"),
        ([pod(leaving=True), pod(phase="Pending")], "pending"),
    ],
)
def test_how_the_head_stands(pods, head):
    assert head_of(pods)[0] == head


def test_a_head_that_was_started_again_in_place_is_another_one():
    assert mark_of(pod()) != mark_of(pod(restarts=1))
    assert mark_of(pod(phase="Pending")) is None


def test_why_a_pod_fits_nowhere():
    waiting = pod("worker", "Pending")
    waiting["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
    ]
    assert unschedulable([pod(), waiting]) == "worker-Pending: 0/3 nodes are available"
    waiting["status"]["conditions"][0]["reason"] = "SchedulingGated"
    assert unschedulable([waiting]) == ""


def test_gpus_of_all_worker_pods():
    container = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    group = {"replicas": 3, "template": {"spec": {"containers": [container]}}}
    assert gpus_of({"workerGroupSpecs": [group, {**group, "replicas": 1, "numOfHosts": 2}]}) == 10.0
    assert gpus_of({}) == 0.0


@pytest.mark.parametrize(("text", "seconds"), [("1970-01-01T00:01:00Z", 60.0), (None, None), ("soon", None)])
def test_times_of_kubernetes(text, seconds):
    assert seconds_of(text) == seconds


def test_a_number_that_a_controller_takes_is_on_the_account_of_the_run() -> None:
    store = Store()
    kube = MemoryKube(store)
    kube.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "maze", "namespace": "team"}}
    kube.create(SERVICE_ACCOUNT, account, "team")
    manifest = {**ray_job(), "metadata": {"name": "maze-s3", "namespace": "team", "labels": {"argusrl.io/run": "maze"}}}
    del manifest["status"]
    intent = Submission(
        number=3, name="maze-s3", namespace="team", kind="rayjob", reason="lost", text="", time=1.0, manifest=manifest
    )
    assert RayJobTarget(kube).create(intent)
    assert remembered_number(kube, "maze", "team") == 3
