"""argusrl cluster …: a run on Kubernetes. Each sub-verb is a file of this package with register(app)."""

from __future__ import annotations

import typer

from argusrl.cli.lazy import lazy_group

VERBS = {
    "manifest": ("argusrl.cli.cluster.manifest", "Kubernetes objects of a run, as YAML; or check such a file."),
    "install": ("argusrl.cli.cluster.install", "Install the controller and rights, once, as an administrator."),
    "submit": ("argusrl.cli.cluster.submit", "Give a run to the cluster, or let it go on there."),
    "status": ("argusrl.cli.cluster.status", "Runs in the cluster: submissions, pods, nodes, and what waits for what."),
    "logs": ("argusrl.cli.cluster.logs", "What a run's pods write, or wrote."),
    "drain": ("argusrl.cli.cluster.drain", "Have a node of a run emptied."),
    "stop": ("argusrl.cli.cluster.stop", "Stop a run for good; it can be submitted again."),
    "watch": ("argusrl.cli.cluster.watch", "The controller: keeps the cluster's runs going."),
    "doctor": ("argusrl.cli.cluster.doctor", "Check the cluster: rights, KubeRay, storage, nodes, clocks."),
    "bundle": ("argusrl.cli.cluster.bundle", "Wheels and images for a cluster without internet."),
}

app = typer.Typer(cls=lazy_group(VERBS), help="Run on Kubernetes: HyperPod, or any cluster with KubeRay.")


@app.callback(no_args_is_help=True)
def _cluster() -> None:
    """Run on Kubernetes: HyperPod, or any cluster with KubeRay."""


def register(parent: typer.Typer) -> None:
    """Add the group."""
    parent.add_typer(app, name="cluster")
