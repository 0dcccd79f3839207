"""argusrl cluster watch: the controller."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argusrl.cli.cluster.options import ContextOption
from argusrl.cli.output import JsonOption, say, say_json, say_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from argusrl.cluster.controller import Controller
    from argusrl.cluster.hyperpod import HyperPod
    from argusrl.cluster.kube_api import Object
    from argusrl.cluster.targets import RayJobsApi

_ROOT_SECONDS = 5.0  # between looks for a root that is not there yet


def register(app: typer.Typer) -> None:
    """Add the sub-verb."""

    @app.command("watch")
    def watch(
        root: Annotated[Path, typer.Option("--root", help="Folder that holds run folders, as pods see it.")],
        namespace: Annotated[
            list[str] | None,
            typer.Option("--namespace", "-n", help="Namespace with runs; again for more. Default: all."),
        ] = None,
        once: Annotated[bool, typer.Option("--once", help="Look once, act, and end.")] = False,
        hyperpod: Annotated[
            str | None, typer.Option("--hyperpod", help="HyperPod cluster, where nodes do not name it by label.")
        ] = None,
        region: Annotated[
            str | None, typer.Option("--region", help="AWS region; default is the process's own.")
        ] = None,
        context: ContextOption = None,
        as_json: JsonOption = False,
    ) -> None:
        """Keep the runs of a cluster going: resubmit, drain, notify. A Deployment runs this.

        It keeps nothing of its own, so it may be killed at any time, and two may run. SIGTERM ends it. A root that is
        not there yet is waited for.
        """
        if not _await_root(root.absolute(), wait=not once, as_json=as_json):
            return
        controller = _controller(root.absolute(), namespace or [""], hyperpod, region, context, quiet=as_json)
        if once:
            _once(controller, as_json)
        else:
            _watch(controller, as_json)


def _await_root(root: Path, *, wait: bool, as_json: bool) -> bool:
    """Wait until the root is there: on a new file system it is made after the controller. False when told to end.

    Raises ConfigError where nobody waits.
    """
    import json
    import signal
    import threading

    from argusrl.errors import ConfigError

    missing = f"{root} is not there"
    hint = "mount the shared file system where pods have it and make the folder (mkdir -p), or give --root"
    if root.is_dir():
        return True
    if not wait:
        raise ConfigError(missing, hint)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    text = f"waiting: {missing}; {hint}"
    say(json.dumps({"message": text}) if as_json else text, None if as_json else "yellow")
    while not root.is_dir():
        if stop.wait(_ROOT_SECONDS):
            return False
    return True


def _controller(
    root: Path, namespaces: list[str], hyperpod: str | None, region: str | None, context: str | None, *, quiet: bool
) -> Controller:
    from argusrl.cluster.controller import Controller
    from argusrl.cluster.kube import connect

    kube = connect(context, namespaces[0] or None)
    return Controller(
        root=root,
        kube=kube,
        namespaces=namespaces,
        jobs_of=_jobs_of(),
        hyperpod=_hyperpods(hyperpod, region),
        say=(lambda text: typer.echo(text, err=True)) if quiet else say,
    )


def _once(controller: Controller, as_json: bool) -> None:
    from argusrl.cluster.controller import standing

    runs = [standing(watched) for watched in controller.reconcile()]
    controller.close()
    if as_json:
        say_json(runs)
    elif not runs:
        say("no runs")
    else:
        keys = ["run", "submission", "step", "job", "head", "row", "action"]
        say_table(keys, [[str(run[key]) for key in keys] for run in runs])


def _watch(controller: Controller, as_json: bool) -> None:
    import json
    import signal
    import threading

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if as_json:
        controller.say = lambda text: typer.echo(json.dumps({"message": text}))
    places = ", ".join(name or "all namespaces" for name in controller.namespaces)
    controller.say(f"watching runs below {controller.root} in {places}")
    controller.run(stop)


def _jobs_of() -> Callable[[Object], RayJobsApi]:
    """One client for each Ray cluster, by its dashboard's address."""
    from argusrl.cluster.ray_jobs import RayJobs, head_address

    clients: dict[str, RayJobs] = {}

    def jobs_of(cluster: Object) -> RayJobsApi:
        address = head_address(cluster)
        if address not in clients:
            clients[address] = RayJobs(address, timeout_seconds=10.0)
        return clients[address]

    return jobs_of


def _hyperpods(cluster: str | None, region: str | None) -> Callable[[str], HyperPod | None]:
    """One client for each HyperPod cluster that nodes name; none where AWS is not at hand."""
    from argusrl.cluster.hyperpod import connect
    from argusrl.errors import ClusterError

    clients: dict[str, HyperPod | None] = {}

    def hyperpod(named: str) -> HyperPod | None:
        name = cluster or named
        if not name:
            return None
        if name not in clients:
            try:
                clients[name] = connect(name, region)
            except ClusterError as error:
                say(f"no HyperPod API: {error.message}", "yellow")
                clients[name] = None
        return clients[name]

    return hyperpod
