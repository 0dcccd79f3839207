"""argusrl cluster stop: end a run on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argusrl.cli.cluster.options import (
    AddressOption,
    ClusterOption,
    ContextOption,
    NamespaceOption,
    RunsOption,
    open_kube,
    seen_folder,
)
from argusrl.cli.output import say

if TYPE_CHECKING:
    from argusrl.cluster.kube import Kube
    from argusrl.cluster.overview import RunOverview
    from argusrl.cluster.ray_jobs import RayJobs
    from argusrl.storage.layout import RunFolder


def register(app: typer.Typer) -> None:
    """Add the sub-verb."""

    @app.command("stop")
    def stop(
        run: Annotated[str, typer.Argument(help="Name of the run.")],
        root: RunsOption = None,
        address: AddressOption = None,
        cluster: ClusterOption = None,
        wait_seconds: Annotated[float, typer.Option("--wait", help="Seconds to wait until its pods are gone.")] = 180.0,
        namespace: NamespaceOption = None,
        context: ContextOption = None,
    ) -> None:
        """Stop a run for good: delete its RayJob, and wait until everything is sealed and the pods are gone.

        A run whose RayJob a person deletes is not submitted again by the controller; one that waits to be submitted
        again is kept from it. `argusrl cluster submit` with the same recipe goes on where it stopped.
        """
        from argusrl.cli.cluster.reach import open_cluster_jobs, open_jobs, require_one

        require_one(address, cluster)
        if address is not None:
            with open_jobs(address) as jobs:
                _stop_jobs(jobs, run, wait_seconds, required=True)
            return
        kube = open_kube(context, namespace)
        if cluster is not None:
            released = _release(kube, cluster, root)  # first: or the controller submits it again
            with open_cluster_jobs(kube, cluster) as jobs:
                _stop_jobs(jobs, run, wait_seconds, required=not released)
            return
        _stop_ray_job(kube, run, root, wait_seconds)


def _stop_ray_job(kube: Kube, run: str, root: Path | None, wait_seconds: float) -> None:
    from argusrl.cli.cluster.record import find_run
    from argusrl.cluster.stop import delete_jobs
    from argusrl.recovery.resume import last_verdict

    found = find_run(kube, run, root)
    folder = seen_folder(found.folder, root)
    kept_back = _end_intent(folder)
    deleted = delete_jobs(kube, found, wait_seconds)
    for job in deleted:
        if job.live or job.state == "deleting":
            say(f"✓ RayJob {job.name} and its pods are gone", "green")
        else:
            say(
                f"✓ RayJob {job.name}, which was over ({job.state}), is deleted: the run is not submitted again",
                "green",
            )
    if not deleted and not kept_back:
        _require_some(found)
    verdict = last_verdict(folder) if folder is not None else None
    if verdict is not None:
        say(f"  {verdict.outcome} after step {verdict.step}: {verdict.reason}")
    else:
        say(f"  how it ended is in {found.folder or 'its run folder'}/attempts (argusrl runs show)")
    if folder is None and not any(job.live for job in deleted):
        say(
            "  The controller may have decided on the next submission already, which only the run folder shows "
            f"(--root): if argusrl cluster status {run} shows one within a minute, stop it again.",
            "yellow",
        )


def _require_some(found: RunOverview) -> None:
    """Raises ConfigError: there is nothing to stop."""
    from argusrl.cluster.kinds import RAY_JOB
    from argusrl.errors import ConfigError

    clusters = [one.cluster for one in found.submissions if one.kind != RAY_JOB.name]
    hint = f"it is a job of RayCluster {clusters[0]}: add --cluster {clusters[0]}" if clusters else ""
    raise ConfigError(
        f"run {found.run} has no RayJob that runs, nor one that waits to be submitted again",
        hint or f"argusrl cluster status {found.run}",
    )


def _end_intent(folder: RunFolder | None) -> bool:
    """Keep a submission back that the controller has decided on and not made; whether there was one."""
    from argusrl.cluster.stop import end_intent

    name = end_intent(folder) if folder is not None else ""
    if name:
        say(f"✓ {name}, which the controller was about to submit, is not submitted", "green")
    return bool(name)


def _release(kube: Kube, cluster: str, root: Path | None) -> bool:
    """Take the run off a RayCluster; whether the controller would have gone on with it."""
    from argusrl.cluster.kinds import RAY_CLUSTER
    from argusrl.cluster.kube_api import annotations_of
    from argusrl.cluster.names import FOLDER_ANNOTATION, JOB_ANNOTATION
    from argusrl.cluster.submit import release_cluster

    notes = annotations_of(kube.get(RAY_CLUSTER, cluster))
    release_cluster(kube, cluster, kube.namespace)
    say(f"✓ RayCluster {cluster} is released: the controller does not submit the run there again", "green")
    _end_intent(seen_folder(notes.get(FOLDER_ANNOTATION, ""), root))
    return JOB_ANNOTATION in notes


def _stop_jobs(jobs: RayJobs, run: str, wait_seconds: float, *, required: bool) -> None:
    """Raises ConfigError where none is active, though one is required."""
    from argusrl.cluster.stop import stop_jobs
    from argusrl.errors import ConfigError

    stopped = stop_jobs(jobs, run, wait_seconds)
    if not stopped and required:
        raise ConfigError(f"no job of run {run} is active at {jobs.address}")
    for job in stopped:
        say(f"✓ job {job.submission_id}: {job.status}", "green")
