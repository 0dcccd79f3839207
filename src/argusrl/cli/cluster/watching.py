"""Staying with a run in a cluster: one line for every change, until it ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from argusrl.errors import ClusterError

if TYPE_CHECKING:
    from argusrl.cluster.kube_api import KubeApi
    from argusrl.cluster.overview import RunOverview
    from argusrl.cluster.ray_jobs import RayJobs

_LOOK_SECONDS = 5.0
_PATIENCE_SECONDS = 60.0  # the controller submits again within a minute, or not at all


def watch_run(
    kube: KubeApi, run: str, look_seconds: float = _LOOK_SECONDS, patience_seconds: float = _PATIENCE_SECONDS
) -> int:
    """Say what changes until the newest submission is over for good; 0 if it is complete. Ctrl-C leaves the run alone.

    A submission that failed may be followed by the controller's next one, which is then watched.
    """
    from argusrl.cli.output import say
    from argusrl.cluster.kube_api import Unreachable
    from argusrl.cluster.overview import overviews

    told, live_at = "", time.monotonic()
    while True:
        try:
            found = overviews(kube, run)
        except Unreachable as error:  # laptops sleep, networks fail: the run goes on without being watched
            found, live_at = [], time.monotonic()
            text = error.message
        else:
            text = _line(found[0]) if found else "no object of the run is in the cluster"
        if text != told:
            say(f"{time.strftime('%H:%M:%S')}  {text}")
            told = text
        newest = found[0].newest if found else None
        if newest is not None and newest.state == "complete":
            return 0
        if newest is not None and newest.live:
            live_at = time.monotonic()
        elif time.monotonic() - live_at >= patience_seconds:
            return ClusterError.exit_code
        time.sleep(look_seconds)


def watch_job(jobs: RayJobs, submission_id: str) -> int:
    """Print what a Ray job writes until it ends; 0 if it succeeded."""
    import typer

    from argusrl.cli.output import say
    from argusrl.observe.redact import Redactor

    redactor = Redactor()
    for piece in jobs.follow(submission_id):
        typer.echo(redactor.text(piece), nl=False)
    job = jobs.get(submission_id)
    status = job.status if job is not None else "gone"
    say(f"job {submission_id}: {status} {job.message if job is not None else ''}".rstrip())
    return 0 if status == "SUCCEEDED" else ClusterError.exit_code


def _line(found: RunOverview) -> str:
    newest = found.newest
    name = newest.name if newest is not None else found.run
    running = sum(pod.phase == "Running" for pod in found.pods)
    parts = [f"{name}: {found.state}", f"{running} of {len(found.pods)} pods run"]
    if newest is not None and newest.reason:
        parts.append(newest.reason)
    parts += [f"{one.what}: {one.text}" for one in found.waiting if one.text and one.kind != "start"][:3]
    parts += [f"node {node.name}: {node.detail or node.health}" for node in found.nodes if not node.healthy]
    return "; ".join(parts)
