"""Where a run's submissions live: as RayJobs, or as jobs of a RayCluster that somebody else made.

Both are created under names that follow from the run, so creating twice finds the first one there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from argusrl.cluster.kinds import NODE, POD, RAY_CLUSTER, RAY_JOB
from argusrl.cluster.kube_api import Conflict, KubeApi, KubeError, NotFound, Object, annotations_of, labels_of, name_of
from argusrl.cluster.manifests.job import renumbered
from argusrl.cluster.names import JOB_ANNOTATION, RUN_LABEL, SUBMISSION_LABEL, SUBMISSION_VARIABLE
from argusrl.cluster.numbering import remember_number
from argusrl.cluster.observation import Job, Node
from argusrl.cluster.sighting import (
    CLUSTER_LABEL,
    QUEUE_LABEL,
    SUBMITTED_BY,
    Sighting,
    gpus_of,
    head_of,
    is_admitted,
    is_leaving,
    job_of,
    mark_of,
    node_is_ready,
    node_of,
    uid_of,
    unschedulable,
)
from argusrl.errors import ClusterError
from argusrl.journal.submissions import Submission

_KEPT_METADATA = ("labels", "annotations")
_DROPPED_ANNOTATIONS = ("kubectl.kubernetes.io/last-applied-configuration",)
_DROPPED_SPEC = ("suspend",)  # whether a job is suspended is for its queue to say
_JOB_STATES: dict[str, Job] = {"PENDING": "starting", "RUNNING": "running", "SUCCEEDED": "complete"}


class Target(Protocol):
    """Where the objects of submissions are. Methods raise ClusterError where the cluster does not answer."""

    def look(self, submission: Submission, uid: str) -> Sighting:
        """The object of a submission and its pods; absent also where another object has its name."""
        ...

    def create(self, submission: Submission) -> str:
        """Create it, or find it there: its id; empty while one of that name is still going, or where it may not be."""
        ...

    def remove(self, submission: Submission, uid: str) -> bool:
        """Delete the object with this id: True once it is gone or going."""
        ...


@dataclass(slots=True)
class RayJobTarget:
    """RayJobs."""

    kube: KubeApi

    def look(self, submission: Submission, uid: str) -> Sighting:
        try:
            ray_job = self.kube.get(RAY_JOB, submission.name, submission.namespace)
        except NotFound:
            return Sighting(job="absent")
        except KubeError as error:
            return Sighting(job="unknown", job_message=error.message)
        if uid and uid_of(ray_job) != uid:
            return Sighting(job="absent")
        status = ray_job.get("status") or {}
        cluster = str(status.get("rayClusterName") or "")
        sight = Sighting(
            job=job_of(ray_job),
            uid=uid_of(ray_job),
            job_reason=str(status.get("reason") or ""),
            job_message=str(status.get("message") or ""),
            job_stopped=status.get("jobStatus") == "STOPPED",
            queued=QUEUE_LABEL in labels_of(ray_job),
            admitted=is_admitted(ray_job),
            cluster=cluster,
        )
        return with_pods(self.kube, sight, submission.namespace) if cluster else sight

    def create(self, submission: Submission) -> str:
        uid = self._create(submission)
        if uid:  # not before: whoever is to create must do so at once after looking whether that is still wanted
            run = labels_of(submission.manifest).get(RUN_LABEL, "")
            remember_number(self.kube, run, submission.namespace, submission.number)  # a person's next one is above it
        return uid

    def _create(self, submission: Submission) -> str:
        try:
            return uid_of(self.kube.create(RAY_JOB, submission.manifest, submission.namespace))
        except Conflict as error:
            if not error.exists:
                raise
        try:
            found = self.kube.get(RAY_JOB, submission.name, submission.namespace)
        except NotFound:
            return ""
        return "" if is_leaving(found) else uid_of(found)

    def remove(self, submission: Submission, uid: str) -> bool:
        try:
            found = self.kube.get(RAY_JOB, submission.name, submission.namespace)
        except NotFound:
            return True
        if uid_of(found) != uid or is_leaving(found):
            return True
        version = str(found["metadata"].get("resourceVersion", "")) or None
        try:
            self.kube.delete(RAY_JOB, submission.name, submission.namespace, uid=uid, resource_version=version)
        except Conflict:  # it changed since it was read: look again before it is deleted
            return False
        return True


class RayJobsApi(Protocol):
    """The Ray Jobs API of one Ray cluster."""

    def status(self, submission_id: str) -> str | None:
        """PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED; None where there is no such job. Raises ClusterError."""
        ...

    def submit(
        self, submission_id: str, entrypoint: str, runtime_env: dict[str, Any], metadata: dict[str, str]
    ) -> bool:
        """Submit; False where the id is taken. Raises ClusterError."""
        ...

    def stop(self, submission_id: str) -> bool:
        """Stop; False where it does not run. Raises ClusterError."""
        ...


@dataclass(slots=True)
class ClusterJobTarget:
    """Jobs of a RayCluster with JOB_ANNOTATION. A job goes with the head; the RayCluster is nobody's to delete here."""

    kube: KubeApi
    jobs_of: Callable[[Object], RayJobsApi]  # by the RayCluster

    def look(self, submission: Submission, uid: str) -> Sighting:
        try:
            cluster = self._cluster(submission)
        except NotFound:
            return Sighting(job="absent")
        except KubeError as error:
            return Sighting(job="unknown", job_message=error.message)
        if not _is_given(cluster):
            return Sighting(job="absent")
        sight = with_pods(self.kube, Sighting(job="running", cluster=name_of(cluster), uid=""), submission.namespace)
        if sight.head != "running":
            return replace(sight, uid=uid)
        try:
            status = self.jobs_of(cluster).status(submission.name)
        except ClusterError:  # the head is there by Kubernetes' word and does not answer: heartbeats decide
            return replace(sight, uid=uid)
        if status is None:
            # A head that was started anew has forgotten the job: as if its pod had been replaced.
            return replace(sight, uid=uid, head="replaced" if uid else sight.head)
        job = _JOB_STATES.get(status, "failed")
        return replace(sight, job=job, uid=submission.name, job_stopped=status == "STOPPED")

    def create(self, submission: Submission) -> str:
        cluster = self._cluster(submission)
        if not _is_given(cluster):
            return ""
        manifest, number = submission.manifest, str(submission.number)
        runtime_env = dict(manifest.get("runtime_env") or {})
        runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), SUBMISSION_VARIABLE: number}
        run = submission.name.rpartition("-s")[0]
        self.jobs_of(cluster).submit(
            submission.name, manifest["entrypoint"], runtime_env, {"run": run, "submission": number}
        )
        return submission.name

    def remove(self, submission: Submission, uid: str) -> bool:
        try:
            self.jobs_of(self._cluster(submission)).stop(submission.name)
        except NotFound:
            return True
        except ClusterError:  # with its head the job is gone, too; where the head lives on unseen, the fence ends it
            return True
        return True

    def _cluster(self, submission: Submission) -> Object:
        return self.kube.get(RAY_CLUSTER, submission.manifest["cluster"], submission.namespace)


def _is_given(cluster: Object) -> bool:
    """Whether the run may have a job there; a person takes it off by removing the annotation."""
    return JOB_ANNOTATION in annotations_of(cluster) and not is_leaving(cluster)


def with_pods(kube: KubeApi, sight: Sighting, namespace: str) -> Sighting:
    """Add pods, head and the head's node. What the API server does not say stays unknown."""
    try:
        pods = kube.list(POD, namespace, labels=f"{CLUSTER_LABEL}={sight.cluster}").items
    except KubeError:
        return replace(sight, head="unknown", node="unknown")
    head, pod = head_of(pods)
    name = node_of(pod)
    node: Node = "well"
    if name:
        try:
            node = "well" if node_is_ready(kube.get(NODE, name)) else "unready"
        except NotFound:
            node = "gone"
        except KubeError:
            node = "unknown"
    return replace(
        sight,
        pods=pods,
        head=head,
        head_pod=name_of(pod) if pod is not None else "",
        head_mark=mark_of(pod),
        head_node=name,
        node=node,
        unschedulable=unschedulable(pods),
    )


def next_manifest(manifest: dict[str, Any], run: str, number: int) -> dict[str, Any]:
    """What the next submission of a run creates: as the one before, under its own name and number."""
    if manifest.get("kind") != RAY_JOB.name:
        return manifest  # a job of a RayCluster: its id is given when it is submitted
    document = renumbered(manifest, run, number)
    document["metadata"].setdefault("annotations", {})[SUBMITTED_BY] = "controller"
    return document


def recorded_manifest(ray_job: Object) -> dict[str, Any]:
    """What of a RayJob in the cluster is worth creating again: no status, no ids, nothing of its queue's."""
    metadata: dict[str, Any] = {key: copy.deepcopy(ray_job["metadata"].get(key) or {}) for key in _KEPT_METADATA}
    for name in _DROPPED_ANNOTATIONS:
        metadata["annotations"].pop(name, None)
    spec = {key: copy.deepcopy(value) for key, value in ray_job["spec"].items() if key not in _DROPPED_SPEC}
    return {
        "apiVersion": RAY_JOB.api_version,
        "kind": RAY_JOB.name,
        "metadata": {"name": name_of(ray_job), "namespace": ray_job["metadata"].get("namespace"), **metadata},
        "spec": spec,
    }


def cluster_job(cluster: Object) -> dict[str, Any]:
    """The job that JOB_ANNOTATION of a RayCluster describes. Raises ClusterError where it is no such description."""
    try:
        found = json.loads(annotations_of(cluster)[JOB_ANNOTATION])
        entrypoint, runtime_env = str(found["entrypoint"]), dict(found.get("runtime_env") or {})
    except (ValueError, TypeError, KeyError) as error:
        raise ClusterError(
            f"RayCluster {name_of(cluster)}: annotation {JOB_ANNOTATION} is no JSON object with an entrypoint: {error}",
            "argusrl cluster submit --cluster writes it",
        ) from error
    text = annotations_of(cluster).get(SUBMISSION_LABEL, "")
    number = int(text) if text.isdecimal() else 1
    return {"cluster": name_of(cluster), "entrypoint": entrypoint, "runtime_env": runtime_env, "number": number}


def gpus_in(manifest: dict[str, Any]) -> float:
    """GPUs that a submission by this manifest occupies; 0 for jobs of clusters that stand anyway."""
    return gpus_of((manifest.get("spec") or {}).get("rayClusterSpec") or {})
