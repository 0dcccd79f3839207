"""Why a pod does not run: scheduler, queue, image, volume or secret, in words and with what to do about it.

KubeRay says nothing of this: a RayJob whose pods fit nowhere sits in Initializing without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from argusrl.cluster.kube_api import Object, conditions_of, name_of

_HEALTH_TAINT = "sagemaker.amazonaws.com/node-health-status"
_PULL = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
_MOUNT = {"FailedMount", "FailedAttachVolume", "FailedMapVolume"}
_TELLING_EVENTS = {*_MOUNT, "FailedScheduling", "FailedCreatePodSandBox", "FailedPreStopHook", "Evicted"}


@dataclass(frozen=True, slots=True)
class Waiting:
    """One reason why something of a run does not go on."""

    what: str  # pod or job
    kind: str  # capacity | selector | taint | quota | image | volume | secret | start | crash
    text: str
    hint: str = ""


_SCHEDULER: tuple[tuple[str, str, str], ...] = (  # pattern in the scheduler's words, kind, hint
    (
        r"Insufficient nvidia\.com/gpu",
        "capacity",
        "no fitting node has enough free GPUs: wait, free some (kubectl get pods -A -o wide), or raise the instance "
        "group's count",
    ),
    (
        r"Insufficient vpc\.amazonaws\.com/efa",
        "capacity",
        "no fitting node has enough free EFA interfaces: is the EFA device plugin running? "
        "cluster.kubernetes.workers.efa lowers the request",
    ),
    (
        r"Insufficient (memory|cpu|ephemeral-storage)",
        "capacity",
        "a pod can ask for about 93 % of a node: lower cluster.kubernetes.head|workers cpus or memory",
    ),
    (
        _HEALTH_TAINT.replace(".", r"\.") + r".*Unschedulable",
        "taint",
        "HyperPod checks, reboots or replaces those nodes; a replacement takes 20 to 30 minutes",
    ),
    (r"untolerated taint", "taint", "those nodes are kept for others: see their taints with kubectl describe node"),
    (
        r"didn't match Pod's node affinity/selector",
        "selector",
        "no node has these labels: check cluster.kubernetes.head|workers instance, instance_group and selector",
    ),
    (
        r"unbound immediate PersistentVolumeClaims|persistentvolumeclaim .* not (found|bound)",
        "volume",
        "the claim of cluster.kubernetes.volume.claim is not bound: kubectl describe pvc",
    ),
    (
        r"volume node affinity conflict",
        "volume",
        "the file system is in another availability zone than the nodes",
    ),
    (r"Too many pods", "capacity", "those nodes are full: more nodes, or a larger instance type"),
)


def waiting_pods(pods: Iterable[Object], events: Sequence[Object] = ()) -> list[Waiting]:
    """Every pod that does not run, and why; pods that run or ended are left out."""
    by_pod: dict[str, list[Object]] = {}
    for event in events:
        about = event.get("involvedObject") or {}
        if about.get("kind") == "Pod" and event.get("reason") in _TELLING_EVENTS:
            by_pod.setdefault(str(about.get("name")), []).append(event)
    found: list[Waiting] = []
    for pod in pods:
        if "deletionTimestamp" not in pod["metadata"]:
            found += _of_pod(pod, sorted(by_pod.get(name_of(pod), []), key=_moment))
    return found


def waiting_quota(job: Object, workloads: Iterable[Object]) -> Waiting | None:
    """A RayJob that Kueue keeps back, or has suspended again; None for any other."""
    if not (job.get("spec") or {}).get("suspend"):
        return None
    uid = job["metadata"].get("uid")
    mine = [one for one in workloads if uid in {owner["uid"] for owner in one["metadata"].get("ownerReferences") or []}]
    text = "suspended"
    for workload in mine:
        conditions = conditions_of(workload)
        for kind in ("Evicted", "QuotaReserved", "Admitted"):
            condition = conditions.get(kind, {})
            if condition.get("status") == ("True" if kind == "Evicted" else "False") and condition.get("message"):
                text = f"{condition.get('reason', kind)}: {condition['message']}"
                break
    queue = (job["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name")
    if queue is None:
        return Waiting(name_of(job), "quota", "suspended by hand: spec.suspend", "whoever suspended it resumes it")
    return Waiting(
        name_of(job),
        "quota",
        f"queue {queue} has not admitted it ({text})",
        "it starts by itself when quota is free; submitting it again would lose its place",
    )


def _of_pod(pod: Object, events: Sequence[Object]) -> list[Waiting]:
    name, status = name_of(pod), pod.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    stuck = [one for one in (_of_container(name, container) for container in containers) if one is not None]
    if stuck or status.get("phase") != "Pending":
        return stuck
    scheduled = conditions_of(pod).get("PodScheduled", {})
    if scheduled.get("reason") == "SchedulingGated":
        return [Waiting(name, "quota", "held back by a scheduling gate (Kueue)", "it starts when quota is free")]
    if scheduled.get("status") == "False":
        return scheduling_reasons(name, str(scheduled.get("message") or ""))
    telling = [event for event in events if event["reason"] in _MOUNT or event["reason"] == "FailedCreatePodSandBox"]
    if telling:
        return [_of_event(name, telling[-1])]
    unplaced = [event for event in events if event["reason"] == "FailedScheduling"]
    if unplaced and not (pod.get("spec") or {}).get("nodeName"):
        return scheduling_reasons(name, str(unplaced[-1].get("message") or ""))
    node = (pod.get("spec") or {}).get("nodeName")
    text = f"starts on {node}: pulls its image and mounts volumes" if node else "not seen by the scheduler yet"
    return [Waiting(name, "start", text)]


def scheduling_reasons(name: str, message: str) -> list[Waiting]:
    """The scheduler's message, cause by cause."""
    text = message.partition(" preemption:")[0].strip().rstrip(".") or "no node fits"
    causes = [(kind, hint) for pattern, kind, hint in _SCHEDULER if re.search(pattern, text)]
    if any(_HEALTH_TAINT in text for _ in causes) and "taint" in {kind for kind, _ in causes}:
        others = len(re.findall(r"untolerated taint", text)) > 1
        causes = [cause for cause in causes if others or "kept for others" not in cause[1]]
    if not causes:
        return [Waiting(name, "capacity", text)]
    return [Waiting(name, kind, text if place == 0 else "", hint) for place, (kind, hint) in enumerate(causes)]


def _of_container(pod: str, container: Object) -> Waiting | None:
    state = (container.get("state") or {}).get("waiting") or {}
    reason, message = str(state.get("reason") or ""), str(state.get("message") or "")
    image = container.get("image", "")
    if reason in _PULL:
        return Waiting(
            pod,
            "image",
            f"{image} cannot be pulled: {message or reason}",
            "check cluster.kubernetes.image, its tag, and image_pull_secrets; nodes need the right to read from ECR",
        )
    if reason in ("CreateContainerConfigError", "CreateContainerError"):
        return Waiting(
            pod, "secret", message or reason, "secrets of cluster.kubernetes.secrets have to exist in the namespace"
        )
    if reason in ("CrashLoopBackOff", "RunContainerError"):
        ended = (container.get("lastState") or {}).get("terminated") or {}
        detail = f"exit code {ended['exitCode']} ({ended.get('reason', '')})" if ended else message
        return Waiting(
            pod, "crash", f"container {container['name']} ends again and again: {detail}", "argusrl cluster logs"
        )
    return None


def _of_event(pod: str, event: Object) -> Waiting:
    message = str(event.get("message") or "")
    if event["reason"] in _MOUNT:
        return Waiting(
            pod,
            "volume",
            message,
            "is the file system up, in the nodes' subnet, and its security group open for TCP 988 and 1018-1023?",
        )
    return Waiting(pod, "start", message)


def _moment(event: Object) -> str:
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
        or ""
    )
