"""Ending a run on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable

from argusrl.cluster.kinds import RAY_JOB
from argusrl.cluster.kube_api import KubeApi
from argusrl.cluster.numbering import remember_number
from argusrl.cluster.overview import RunOverview, SubmissionView
from argusrl.cluster.ray_jobs import RayJobs, RayJobView
from argusrl.cluster.submit import jobs_of_run
from argusrl.errors import ClusterError
from argusrl.journal.submissions import (
    SubmissionEnd,
    newest_submission,
    read_end,
    read_made,
    read_submission,
    record_end,
)
from argusrl.storage.layout import RunFolder

_POLL_SECONDS = 1.0


def end_intent(run: RunFolder, wall: Callable[[], float] = time.time) -> str:
    """End a submission that the controller has decided on and not carried out; its name, empty without one.

    Raises StorageError.
    """
    number = newest_submission(run)
    if not number or read_end(run, number) is not None or read_made(run, number) is not None:
        return ""
    intent = read_submission(run, number)
    if not intent.by_controller:
        return ""
    text = "a person stopped the run before it was submitted again"
    end = SubmissionEnd(number=number, reason="person", outcome="stopped", text=text, time=wall())
    return intent.name if record_end(run, end) == end else ""


def delete_jobs(kube: KubeApi, found: RunOverview, wait_seconds: float) -> list[SubmissionView]:
    """Delete the RayJobs of a run that are not over, in the foreground: pods first, each with its own grace.

    Pods get SIGTERM and the grace of their manifest, in which everything is sealed. Where none runs, the newest one is
    deleted that failed: the controller, which would submit the run again, takes that for a person's wish. Returns what
    was deleted. Raises ClusterError where something is left after `wait_seconds`.
    """
    mine = [one for one in found.submissions if one.kind == RAY_JOB.name]
    jobs = [one for one in mine if one.live or one.state == "deleting"]
    jobs = jobs or [one for one in mine[-1:] if one.state != "complete"]
    if not jobs:
        return []
    remember_number(kube, found.run, found.namespace, max(one.number for one in mine))
    for job in jobs:
        if job.state != "deleting":
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
            return jobs
    raise ClusterError(
        f"after {wait_seconds:.0f} s RayJob {', '.join(left)} is still being deleted",
        "argusrl cluster status shows its pods; one on a node that is gone stays until it is deleted by force, "
        "which the controller does: kubectl delete pod NAME --grace-period=0 --force",
    )


def stop_jobs(jobs: RayJobs, run: str, wait_seconds: float) -> list[RayJobView]:
    """Stop the active jobs of a run in somebody's Ray cluster and wait; how they stand. Raises ClusterError."""
    active = [job for job in jobs_of_run(jobs, run) if not job.ended]
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
