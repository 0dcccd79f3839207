"""What a cluster shows of runs: their submissions, pods, nodes, and what waits for what."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from argusrl.cluster.kinds import EVENT, NODE, POD, RAY_CLUSTER, RAY_JOB, WORKLOAD
from argusrl.cluster.kube_api import KubeApi, KubeError, NotFound, Object, annotations_of, labels_of, name_of
from argusrl.cluster.names import FOLDER_ANNOTATION, JOB_ANNOTATION, RUN_LABEL, label_of
from argusrl.cluster.node_health import node_health
from argusrl.cluster.sighting import (
    CLUSTER_LABEL,
    NODE_TYPE_LABEL,
    is_live,
    job_of,
    node_of,
    submission_of,
)
from argusrl.cluster.waiting import Waiting, waiting_pods, waiting_quota
from argusrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SubmissionView:
    """One RayJob of a run, or the Ray job on a cluster that is there anyway."""

    name: str
    number: int
    kind: str  # RayJob | RayCluster
    state: str  # starting | running | complete | failed | invalid | suspended | retrying | deleting | unknown
    reason: str  # as KubeRay says it
    cluster: str  # RayCluster
    age_seconds: float
    live: bool
    object: Object = field(repr=False)


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod."""

    name: str
    role: str  # head | worker
    container: str  # with Ray in it: the first
    submission: int
    phase: str  # as Kubernetes says it, or Terminating
    ready: bool
    restarts: int
    node: str
    ended: str  # why its container ended last, with the exit code
    age_seconds: float


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node with pods of the run."""

    name: str
    instance: str  # instance type
    ready: bool
    health: str  # HyperPod's word, or empty
    healthy: bool
    detail: str  # faults, cordon
    pods: list[str]


@dataclass(slots=True)
class RunOverview:
    """One run."""

    run: str  # label
    namespace: str
    folder: str  # as pods see it; empty where no object says
    submissions: list[SubmissionView] = field(default_factory=list)  # oldest first
    pods: list[PodView] = field(default_factory=list)
    nodes: list[NodeView] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # what could not be read, and why

    @property
    def newest(self) -> SubmissionView | None:
        return self.submissions[-1] if self.submissions else None

    @property
    def head(self) -> PodView | None:
        """The newest head pod that runs."""
        heads = [pod for pod in self.pods if pod.role == "head" and pod.phase == "Running"]
        return max(heads, key=lambda pod: pod.submission, default=None)

    @property
    def state(self) -> str:
        """One word or two for people."""
        newest = self.newest
        if newest is None:
            return "nothing in the cluster"
        if not newest.live:
            return newest.state
        kinds = {one.kind for one in self.waiting}
        if "quota" in kinds:
            return "waiting for quota"
        if kinds & {"capacity", "selector", "taint"}:
            return "waiting for nodes"
        return "pods cannot start" if kinds & {"image", "volume", "secret", "crash"} else newest.state


def overviews(kube: KubeApi, run: str | None = None, namespace: str | None = None) -> list[RunOverview]:
    """All runs of a namespace that have objects in the cluster, or the one of this name. Raises KubeError."""
    chosen = f"{RUN_LABEL}={label_of(run)}" if run is not None else RUN_LABEL
    jobs = _kind_or_nothing(kube, RAY_JOB, namespace, chosen)
    clusters = [
        cluster
        for cluster in _kind_or_nothing(kube, RAY_CLUSTER, namespace, chosen)
        if JOB_ANNOTATION in annotations_of(cluster)  # the others belong to RayJobs
    ]
    names = sorted({labels_of(one)[RUN_LABEL] for one in [*jobs, *clusters]})
    return [_overview(kube, name, jobs, clusters) for name in names]


def find_overview(kube: KubeApi, run: str | None, namespace: str | None = None) -> RunOverview:
    """The run of this name, or the only one there is. Raises ConfigError with the names that are there."""
    found = overviews(kube, run, namespace)
    if len(found) == 1:
        return found[0]
    place = kube.namespace if namespace is None else namespace
    if run is not None:
        there = ", ".join(one.run for one in overviews(kube, None, namespace)) or "none"
        raise ConfigError(f"no run {run} in namespace {place}", f"runs there: {there}; --namespace looks elsewhere")
    if not found:
        raise ConfigError(f"no runs in namespace {place}", "argusrl cluster submit RECIPE, or --namespace NAME")
    raise ConfigError(f"which run? {', '.join(one.run for one in found)}", "give its name")


def _kind_or_nothing(kube: KubeApi, kind: Any, namespace: str | None, labels: str = "") -> list[Object]:
    try:
        return kube.list(kind, namespace, labels=labels).items
    except NotFound:  # the kind is not installed
        return []


def _overview(kube: KubeApi, run: str, jobs: Sequence[Object], clusters: Sequence[Object]) -> RunOverview:
    mine = [job for job in jobs if labels_of(job)[RUN_LABEL] == run]
    hosts = [cluster for cluster in clusters if labels_of(cluster)[RUN_LABEL] == run]
    place = str((mine or hosts)[0]["metadata"].get("namespace", ""))
    unknown: list[str] = []
    pods = kube.list(POD, place, labels=f"{RUN_LABEL}={run}").items
    for cluster in hosts:
        pods += kube.list(POD, place, labels=f"{CLUSTER_LABEL}={name_of(cluster)}").items
    events = _readable(lambda: kube.list(EVENT, place, fields="involvedObject.kind=Pod").items, "events", unknown)
    suspended = [job for job in mine if (job.get("spec") or {}).get("suspend") and is_live(job)]
    workloads = _readable(lambda: kube.list(WORKLOAD, place).items, "Kueue workloads", unknown) if suspended else []
    queued = [one for one in (waiting_quota(job, workloads) for job in suspended) if one is not None]
    submissions = [_submission(one) for one in [*mine, *hosts]]
    folders = [annotations_of(one).get(FOLDER_ANNOTATION, "") for one in [*reversed(mine), *hosts]]
    return RunOverview(
        run=run,
        namespace=place,
        folder=next(filter(None, folders), ""),
        submissions=sorted(submissions, key=lambda one: (one.number, -one.age_seconds)),
        pods=[_pod(pod) for pod in pods],
        nodes=_nodes(kube, pods, unknown),
        waiting=[*queued, *waiting_pods(pods, events)],
        unknown=unknown,
    )


def _readable(read: Any, what: str, unknown: list[str]) -> list[Object]:
    try:
        items: list[Object] = read()
    except KubeError as error:
        unknown.append(f"{what}: {error.message}")
        return []
    return items


def _submission(found: Object) -> SubmissionView:
    status = found.get("status") or {}
    job = found["kind"] == RAY_JOB.name
    return SubmissionView(
        name=name_of(found),
        number=submission_of(found),
        kind=found["kind"],
        state=job_of(found) if job else str(status.get("state") or "unknown"),
        reason=": ".join(filter(None, [status.get("reason"), status.get("message")])),
        cluster=str(status.get("rayClusterName") or "") if job else name_of(found),
        age_seconds=age_seconds(found),
        live=is_live(found) if job else True,
        object=found,
    )


def _pod(pod: Object) -> PodView:
    status = pod.get("status") or {}
    containers = status.get("containerStatuses") or []
    return PodView(
        name=name_of(pod),
        role=labels_of(pod).get(NODE_TYPE_LABEL, ""),
        container=str(pod["spec"]["containers"][0]["name"]) if pod["spec"].get("containers") else "",
        submission=submission_of(pod),
        phase="Terminating" if "deletionTimestamp" in pod["metadata"] else str(status.get("phase", "Unknown")),
        ready=bool(containers) and all(container.get("ready") for container in containers),
        restarts=sum(container.get("restartCount", 0) for container in containers),
        node=node_of(pod),
        ended=next(filter(None, map(_ended, containers)), ""),
        age_seconds=age_seconds(pod),
    )


def _ended(container: Object) -> str:
    for name in ("state", "lastState"):
        if over := (container.get(name) or {}).get("terminated"):
            return f"exit code {over.get('exitCode')} ({over.get('reason', 'unknown')})"
    return ""


def _nodes(kube: KubeApi, pods: Sequence[Object], unknown: list[str]) -> list[NodeView]:
    by_node: dict[str, list[str]] = {}
    for pod in pods:
        if name := node_of(pod):
            by_node.setdefault(name, []).append(name_of(pod))
    views = []
    for name, here in sorted(by_node.items()):
        try:
            node = kube.get(NODE, name)
        except NotFound:
            views.append(NodeView(name, "", False, "gone", False, "the node is gone from the cluster", here))
            continue
        except KubeError as error:
            unknown.append(f"node {name}: {error.message}")
            continue
        views.append(_node(node, here))
    return views


def _node(node: Object, pods: list[str]) -> NodeView:
    health = node_health(node)
    cordoned = "cordoned" if (node.get("spec") or {}).get("unschedulable") else ""
    return NodeView(
        name=health.name,
        instance=labels_of(node).get("node.kubernetes.io/instance-type", ""),
        ready=health.ready,
        health=health.status,
        healthy=health.ready and health.healthy,
        detail=", ".join(filter(None, [health.text(), cordoned])),
        pods=pods,
    )


def age_seconds(found: Object) -> float:
    """Since it was created, by the clock of this machine; 0 where it is not known."""
    text = found["metadata"].get("creationTimestamp")
    return max(0.0, seconds_since(str(text))) if text else 0.0


def seconds_since(moment: str) -> float:
    """Since a time as Kubernetes writes it, by the clock of this machine."""
    return time.time() - datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()
