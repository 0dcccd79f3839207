"""Ending a run on purpose."""

from __future__ import annotations

import time

from argusrl.cluster.kinds import RAY_JOB
from argusrl.cluster.kube_api import KubeApi
from argusrl.cluster.names import label_of
from argusrl.cluster.overview import RunOverview
from argusrl.cluster.ray_jobs import RayJobs, RayJobView
from argusrl.cluster.submit import jobs_of_run
from argusrl.errors import ClusterError, ConfigError

_POLL_SECONDS = 1.0


def delete_jobs(kube: KubeApi, found: RunOverview, wait_seconds: float) -> list[str]:
    """Delete the RayJobs of a run that are not over, in the foreground: pods first, each with its own grace.

    Pods get SIGTERM and the grace of their manifest, in which everything is sealed. Returns the names. Raises
    ClusterError where something is left after `wait_seconds`, ConfigError where the run has no such job.
    """
    jobs = [one for one in found.submissions if one.kind == RAY_JOB.name and (one.live or one.state == "deleting")]
    if not jobs:
        clusters = [one.cluster for one in found.submissions if one.kind != RAY_JOB.name]
        hint = f"it is a job of RayCluster {clusters[0]}: add --cluster {clusters[0]}" if clusters else ""
        raise ConfigError(f"run {found.run} has no RayJob that runs", hint or f"argusrl cluster status {found.run}")
    for job in jobs:
        if job.live:
            uid = job.object["metadata"]["uid"]
            kube.delete(RAY_JOB, job.name, found.namespace, uid=uid, propagation="Foreground")
    left = {job.name: job.object["metadata"]["uid"] for job in jobs}
    for change in kube.watch(RAY_JOB, found.namespace, labels=f"argusrl.io/run={found.run}", seconds=wait_seconds):
        meta = change.object.get("metadata", {})
        if change.kind == "listed":
            here = {job["metadata"]["uid"] for job in kube.list(RAY_JOB, found.namespace).items}
            left = {name: uid for name, uid in left.items() if uid in here}
        elif change.kind == "deleted" and left.get(meta["name"]) == meta["uid"]:
            del left[meta["name"]]
        if change.kind in ("listed", "deleted") and not left:
            return [job.name for job in jobs]
    raise ClusterError(
        f"after {wait_seconds:.0f} s RayJob {', '.join(left)} is still being deleted",
        "argusrl cluster status shows its pods; one on a node that is gone stays until it is deleted by force, "
        "which the controller does: kubectl delete pod NAME --grace-period=0 --force",
    )


def stop_jobs(jobs: RayJobs, run: str, wait_seconds: float) -> list[RayJobView]:
    """Stop the jobs of a run in somebody's Ray cluster and wait; how they stand. Raises ClusterError, ConfigError."""
    active = [job for job in jobs_of_run(jobs, run) if not job.ended]
    if not active:
        raise ConfigError(f"no job of run {label_of(run)} is active at {jobs.address}")
    for job in active:
        jobs.stop(job.submission_id)
    deadline = time.monotonic() + wait_seconds
    ended: list[RayJobView] = []
    for job in active:
        while True:
            now = jobs.get(job.submission_id)
            if now is None or now.ended:
                ended += [now] if now is not None else []
                break
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"job {job.submission_id} is {now.status} {wait_seconds:.0f} s after it was asked to stop",
                    f"argusrl cluster logs {run} --address {jobs.address}",
                )
            time.sleep(_POLL_SECONDS)
    return ended
