"""What objects of Kubernetes say about a run: head pod, its node, RayJob, queue, pods that fit nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from argusrl.cluster.kube_api import Object, annotations_of, conditions_of, labels_of, name_of
from argusrl.cluster.names import SUBMISSION_LABEL
from argusrl.cluster.observation import Head, Job, Node

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
CLUSTER_LABEL = "ray.io/cluster"
NODE_TYPE_LABEL = "ray.io/node-type"
SUBMITTED_BY = "argusrl.io/submitted-by"  # annotation: "controller"

_DEPLOYMENT: dict[str, Job] = {  # jobDeploymentStatus of a RayJob
    "": "starting",
    "Initializing": "starting",
    "Waiting": "starting",
    "Running": "running",
    "Complete": "complete",
    "Failed": "failed",
    "ValidationFailed": "invalid",
    "Suspending": "suspended",
    "Suspended": "suspended",
    "Retrying": "retrying",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMark:
    """Which start of which head pod."""

    uid: str
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """The cluster's side of a run, as it is now."""

    job: Job = "absent"
    uid: str = ""
    job_reason: str = ""
    job_message: str = ""
    job_stopped: bool = False
    queued: bool = False
    admitted: bool = True
    cluster: str = ""  # RayCluster
    pods: Sequence[Object] = ()
    head: Head = "none"
    head_pod: str = ""
    head_mark: HeadMark | None = None
    head_node: str = ""
    node: Node = "well"
    unschedulable: str = ""  # why a pod fits nowhere; empty where all fit


def job_of(ray_job: Object) -> Job:
    """How a RayJob stands, by its own words."""
    if is_leaving(ray_job):
        return "deleting"
    status = ray_job.get("status") or {}
    found = _DEPLOYMENT.get(status.get("jobDeploymentStatus") or "", "unknown")
    if (ray_job.get("spec") or {}).get("suspend") and found in ("starting", "running"):
        return "suspended"
    return found


def is_admitted(ray_job: Object) -> bool:
    """False while Kueue keeps it back, or has taken its quota; one that has ended waits for nothing."""
    if job_of(ray_job) in ("complete", "failed", "invalid"):
        return True
    return job_of(ray_job) != "suspended" and not (ray_job.get("spec") or {}).get("suspend")


def is_live(ray_job: Object) -> bool:
    """Whether pods of it run, or may yet."""
    return job_of(ray_job) not in ("complete", "failed", "invalid", "deleting")


def is_leaving(found: Object) -> bool:
    """Whether it is being deleted."""
    return bool(found["metadata"].get("deletionTimestamp"))


def seconds_of(timestamp: str | None) -> float | None:
    """Seconds since 1970 of a time as Kubernetes writes it; None where there is none."""
    try:
        return datetime.fromisoformat((timestamp or "").replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def uid_of(found: Object) -> str:
    return str(found["metadata"].get("uid", ""))


def submission_of(ray_job: Object) -> int:
    """The number that its label says; 0 where there is none."""
    text = labels_of(ray_job).get(SUBMISSION_LABEL, "")
    return int(text) if text.isdecimal() else 0


def by_controller(ray_job: Object) -> bool:
    return annotations_of(ray_job).get(SUBMITTED_BY) == "controller"


def head_of(pods: Sequence[Object]) -> tuple[Head, Object | None]:
    """The head pod among the pods of a RayCluster, and how it stands. One that goes counts only where no other is."""
    heads = [pod for pod in pods if labels_of(pod).get(NODE_TYPE_LABEL) == "head"]
    if not heads:
        return "none", None
    pod = min(heads, key=is_leaving)
    phase = (pod.get("status") or {}).get("phase")
    if phase in ("Failed", "Succeeded"):
        return "ended", pod
    if is_leaving(pod):
        return "leaving", pod
    return ("running" if phase == "Running" else "pending"), pod


def mark_of(pod: Object | None) -> HeadMark | None:
    """None for a pod that does not run."""
    if pod is None or (pod.get("status") or {}).get("phase") != "Running":
        return None
    containers = pod["status"].get("containerStatuses") or []
    return HeadMark(uid=uid_of(pod), restarts=containers[0].get("restartCount", 0) if containers else 0)


def node_of(pod: Object | None) -> str:
    """The node that a pod is bound to; empty before that."""
    return str((pod.get("spec") or {}).get("nodeName") or "") if pod is not None else ""


def node_is_ready(node: Object) -> bool:
    return conditions_of(node).get("Ready", {}).get("status") == "True"


def unschedulable(pods: Sequence[Object]) -> str:
    """The first pod that fits nowhere, with the scheduler's reason; empty where there is none."""
    for pod in pods:
        condition = conditions_of(pod).get("PodScheduled", {})
        if condition.get("status") == "False" and condition.get("reason") == "Unschedulable":
            return f"{name_of(pod)}: {condition.get('message') or 'no node fits'}"
    return ""


def gpus_of(spec: Object) -> float:
    """GPUs of a RayCluster's worker pods, by its rayClusterSpec."""
    total = 0.0
    for group in spec.get("workerGroupSpecs") or []:
        containers = ((group.get("template") or {}).get("spec") or {}).get("containers") or []
        limits = [((container.get("resources") or {}).get("limits") or {}) for container in containers]
        per_pod = sum(float(limit.get("nvidia.com/gpu", 0)) for limit in limits)
        total += per_pod * (group.get("replicas") or group.get("minReplicas") or 0) * (group.get("numOfHosts") or 1)
    return total
