"""argusrl cluster stop: end a run on purpose."""

from __future__ import annotations

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
    from argusrl.cluster.ray_jobs import RayJobs


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

        A run whose RayJob a person deletes is not submitted again by the controller. `argusrl cluster submit` with
        the same recipe goes on where it stopped.
        """
        from argusrl.cli.cluster.reach import open_cluster_jobs, open_jobs, require_one
        from argusrl.cluster.overview import find_overview
        from argusrl.cluster.stop import delete_jobs
        from argusrl.cluster.submit import release_cluster
        from argusrl.recovery.resume import last_verdict

        require_one(address, cluster)
        if address is not None:
            with open_jobs(address) as jobs:
                _stop_job(jobs, run, wait_seconds)
            return
        kube = open_kube(context, namespace)
        if cluster is not None:
            release_cluster(kube, cluster, kube.namespace)  # first: or the controller submits it again
            with open_cluster_jobs(kube, cluster) as jobs:
                _stop_job(jobs, run, wait_seconds)
            return
        found = find_overview(kube, run)
        for name in delete_jobs(kube, found, wait_seconds):
            say(f"✓ RayJob {name} and its pods are gone", "green")
        folder = seen_folder(found.folder, root)
        verdict = last_verdict(folder) if folder is not None else None
        if verdict is not None:
            say(f"  {verdict.outcome} after step {verdict.step}: {verdict.reason}")
        else:
            say(f"  how it ended is in {found.folder or 'its run folder'}/attempts (argusrl runs show)")


def _stop_job(jobs: RayJobs, run: str, wait_seconds: float) -> None:
    from argusrl.cluster.stop import stop_jobs

    for job in stop_jobs(jobs, run, wait_seconds):
        say(f"✓ job {job.submission_id}: {job.status}", "green")
