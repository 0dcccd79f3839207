"""argusrl cluster logs: what a run's pods write, or wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argusrl.cli.cluster.options import (
    AddressOption,
    ClusterOption,
    ContextOption,
    NamespaceOption,
    RunName,
    RunsOption,
    open_kube,
    seen_folder,
)
from argusrl.cli.output import say

if TYPE_CHECKING:
    from argusrl.cluster.kube import Kube
    from argusrl.cluster.overview import PodView, RunOverview
    from argusrl.cluster.ray_jobs import RayJobs

_ROLES = ("head", "worker")


def register(app: typer.Typer) -> None:
    """Add the sub-verb."""

    @app.command("logs")
    def logs(
        run: RunName = None,
        attempt: Annotated[
            int | None, typer.Option("--attempt", min=1, help="Logs that an attempt left in the run folder.")
        ] = None,
        role: Annotated[str | None, typer.Option("--role", help="Pods of this role: head or worker.")] = None,
        node: Annotated[str | None, typer.Option("--node", help="Pods on this Kubernetes node.")] = None,
        pod: Annotated[str | None, typer.Option("--pod", help="This pod.")] = None,
        tail: Annotated[int, typer.Option("--tail", min=1, help="Lines from the end of each.")] = 200,
        follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on while it writes.")] = False,
        reader: Annotated[
            bool, typer.Option("--reader", help="Print the manifest of a small pod that sees the run folder.")
        ] = False,
        root: RunsOption = None,
        address: AddressOption = None,
        cluster: ClusterOption = None,
        namespace: NamespaceOption = None,
        context: ContextOption = None,
    ) -> None:
        """What a run's pods write: the driver's, unless --role, --node or --pod say otherwise.

        When the pods are gone, what they wrote lies in the run folder, one folder for each attempt.
        """
        from argusrl.cli.cluster.reach import open_cluster_jobs, open_jobs, require_one
        from argusrl.cli.cluster.record import find_run
        from argusrl.errors import ConfigError

        require_one(address, cluster)
        if attempt is None and role not in (None, *_ROLES):
            raise ConfigError(f"--role {role}: a pod is a {' or a '.join(_ROLES)}")
        if address is not None:
            with open_jobs(address) as jobs:
                _of_job(jobs, run, follow=follow)
            return
        kube = open_kube(context, namespace)
        if cluster is not None:
            with open_cluster_jobs(kube, cluster) as jobs:
                _of_job(jobs, run, follow=follow)
            return
        found = find_run(kube, run, root)
        if reader:
            _print_reader(found)
            return
        pods = [] if attempt is not None else live_pods(found, role, node, pod)
        if follow and len(pods) > 1:
            names = ", ".join(one.name for one in pods)
            raise ConfigError(f"--follow takes one pod, these fit: {names}", "choose by --pod")
        if pods:
            _of_pods(kube, found, pods, tail, follow=follow)
        else:
            _kept(found, root, attempt, [role, node, pod], tail)


def live_pods(found: RunOverview, role: str | None, node: str | None, pod: str | None) -> list[PodView]:
    """Pods whose output the API server still has, newest submission only; the head without any choice."""
    newest = max((one.submission for one in found.pods), default=0)
    chosen = [
        one
        for one in found.pods
        if one.phase not in ("Pending", "Unknown")
        and (one.submission == newest or pod is not None)
        and (role is None or one.role == role)
        and (node is None or one.node == node)
        and (pod is None or one.name == pod)
    ]
    if role is None and node is None and pod is None:
        return [one for one in chosen if one.role == "head"]
    return chosen


def _of_pods(kube: Kube, found: RunOverview, pods: list[PodView], tail: int, *, follow: bool) -> None:
    from argusrl.cluster.kube_api import KubeError
    from argusrl.observe.redact import Redactor

    redactor = Redactor()
    for pod in pods:
        if len(pods) > 1:
            say(f"==> {pod.name} ({pod.role} on {pod.node}) <==", "cyan")
        try:
            lines = kube.logs(pod.name, found.namespace, container=pod.container, tail_lines=tail, follow=follow)
            for line in lines:
                typer.echo(redactor.text(line))
        except KubeError as error:
            if len(pods) == 1:
                raise
            say(f"{pod.name}: {error.message}", "yellow")


def _of_job(jobs: RayJobs, run: str | None, *, follow: bool) -> None:
    from argusrl.cli.cluster.watching import watch_job
    from argusrl.cluster.submit import jobs_of_run
    from argusrl.errors import ConfigError
    from argusrl.observe.redact import Redactor

    found = jobs.list() if run is None else jobs_of_run(jobs, run)
    if not found:
        raise ConfigError(f"no job {f'of run {run} ' if run else ''}at {jobs.address}")
    newest = found[0].submission_id
    if follow:
        watch_job(jobs, newest)
    else:
        typer.echo(Redactor().text(jobs.logs(newest)), nl=False)


def _kept(found: RunOverview, root: Path | None, attempt: int | None, words: list[str | None], tail: int) -> None:
    """Print the ends of what an attempt left in the run folder, or say where that is."""
    from argusrl.errors import ConfigError
    from argusrl.journal.attempts import newest_attempt
    from argusrl.observe.redact import Redactor

    if attempt is None:
        _require_started(found)
    if not found.folder:
        raise ConfigError(f"run {found.run} has no pod that fits, and no object names its folder")
    folder = seen_folder(found.folder, root)
    if folder is None:
        number = f"{attempt:03d}" if attempt is not None else "*"
        raise ConfigError(
            f"no pod of run {found.run} fits any more; its logs are in {found.folder}/attempts/{number}/logs, which is "
            "not seen from here",
            f"--root where you have it mounted, or a pod that sees it: argusrl cluster logs {found.run} --reader",
        )
    logs = folder.attempt(attempt or max(1, newest_attempt(folder))) / "logs"
    wanted = [word for word in words if word is not None]
    files = sorted(path for path in logs.rglob("*") if path.is_file())
    files = [path for path in files if all(word in path.relative_to(logs).as_posix() for word in wanted)]
    if not files:
        raise ConfigError(f"{logs} holds no logs{f' of {wanted[0]}' if wanted else ''}")
    redactor = Redactor()
    for path in files:
        say(f"==> {path} <==", "cyan")
        for line in path.read_text(errors="replace").splitlines()[-tail:]:
            typer.echo(redactor.text(line))


def _require_started(found: RunOverview) -> None:
    """Raises ConfigError with the reason where the newest submission has no head yet, but will have."""
    from argusrl.errors import ConfigError

    newest = found.newest
    heads = [pod for pod in found.pods if pod.role == "head"]
    if newest is None or not newest.live or any(pod.phase != "Pending" for pod in heads):
        return
    waiting = [one for one in found.waiting if not heads or one.what in (newest.name, *(pod.name for pod in heads))]
    why = "; ".join(one.text for one in waiting if one.text) or "KubeRay has not made its pods yet"
    hint = next((one.hint for one in waiting if one.hint), "")
    raise ConfigError(
        f"{newest.name} has not started: {why}",
        "; ".join(filter(None, [hint, f"--attempt N shows what an earlier attempt of {found.run} left"])),
    )


def _print_reader(found: RunOverview) -> None:
    from argusrl.cluster.reader_pod import reader_pod
    from argusrl.config.yaml_file import dump_yaml

    document = reader_pod(found)
    name = document["metadata"]["name"]
    typer.echo(
        f"# argusrl cluster logs {found.run} --reader | kubectl apply -f -\n"
        f"# kubectl exec -n {found.namespace} {name} -- ls {found.folder}/attempts\n"
        f"# kubectl cp {found.namespace}/{name}:{found.folder}/attempts attempts\n"
        f"# kubectl delete -n {found.namespace} pod {name}\n" + dump_yaml(document),
        nl=False,
    )
