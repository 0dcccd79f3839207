"""Submit a run from a SageMaker Studio space, open its dashboard, and watch it.

    python examples/studio_submit.py recipes/qwen3vl_8b_hyperpod.yaml run.name=maze-1

In a notebook, cell by cell:

    from studio_submit import submit, open_dashboard, watch
    run, namespace = submit("recipes/qwen3vl_8b_hyperpod.yaml", "run.name=maze-1")
    open_dashboard(run, namespace)
    watch(run, namespace)

The space needs `pip install 'argusrl[cluster]'`, a kubeconfig (`aws eks update-kubeconfig --name CLUSTER`) and a role
that may use it. The dashboard needs HyperPod's Ray endpoint operator and `cluster.kubernetes.studio: private` in the
recipe; its link is good for fifteen minutes. A space that mounts the run's file system sees the run folder, too:
`argusrl runs show`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from argusrl.cli.main import run as argusrl
from argusrl.cli.output import say_error
from argusrl.cluster.kinds import RAY_JOB
from argusrl.cluster.kube_api import KubeApi
from argusrl.cluster.names import RUN_LABEL, label_of
from argusrl.config.load import load_config
from argusrl.errors import ArgusError

CONNECTION = {
    "group": "connection.access.sagemaker.amazonaws.com",
    "version": "v1alpha1",
    "plural": "raydashboardconnections",
}


def submit(recipe: str, *overrides: str) -> tuple[str, str]:
    """Check the objects against the cluster, then create them; name and namespace of the run. Exits where it fails."""
    config = load_config(Path(recipe), overrides).config
    if config.cluster.kubernetes is None:
        sys.exit(f"{recipe} has no section cluster.kubernetes")
    with TemporaryDirectory() as folder:  # a file of yours in the working folder stays as it is
        check = ["manifest", recipe, *overrides, "--live", "--output", f"{folder}/run.yaml"]
        for words in (check, ["submit", recipe, *overrides]):
            if code := argusrl(["cluster", *words]):
                sys.exit(code)
    return str(config.run.name), config.cluster.kubernetes.namespace


def ray_cluster_of(kube: KubeApi, run: str, wait_seconds: float = 1800.0, look_seconds: float = 10.0) -> str:
    """Name of the Ray cluster of a run's newest RayJob, once KubeRay has made it. Exits when it is late."""
    deadline = time.monotonic() + wait_seconds
    while True:
        jobs = kube.list(RAY_JOB, labels=f"{RUN_LABEL}={label_of(run)}").items
        newest = max(jobs, key=lambda job: job["metadata"]["creationTimestamp"], default={})
        if name := newest.get("status", {}).get("rayClusterName"):
            return str(name)
        if time.monotonic() >= deadline:
            sys.exit(f"no Ray cluster of {run} after {wait_seconds:.0f} s: argusrl cluster status {run}")
        time.sleep(look_seconds)


def dashboard_url(objects: Any, cluster: str, namespace: str, tries: int = 10, look_seconds: float = 3.0) -> str:
    """The link that the endpoint operator makes; `objects` is the client's CustomObjectsApi. Exits without one."""
    body = {
        "apiVersion": f"{CONNECTION['group']}/{CONNECTION['version']}",
        "kind": "RayDashboardConnection",
        "metadata": {"generateName": f"{cluster}-"},
        "spec": {"clusterName": cluster},
    }
    made = objects.create_namespaced_custom_object(namespace=namespace, body=body, **CONNECTION)
    for _ in range(tries):
        if url := made.get("status", {}).get("connectionUrl"):
            return str(url)
        time.sleep(look_seconds)
        made = objects.get_namespaced_custom_object(namespace=namespace, name=made["metadata"]["name"], **CONNECTION)
    sys.exit(
        f"no link to the dashboard; port-forward it: kubectl -n {namespace} port-forward svc/{cluster}-head-svc 8265"
    )


def open_dashboard(run: str, namespace: str) -> None:
    """Print the link to the run's Ray dashboard; a notebook shows it as one to click."""
    from kubernetes import client, config

    from argusrl.cluster.kube import connect

    config.load_kube_config()
    cluster = ray_cluster_of(connect(namespace=namespace), run)
    print(dashboard_url(client.CustomObjectsApi(), cluster, namespace))


def watch(run: str, namespace: str) -> int:
    """Say what changes until the run is over, resubmissions by the controller included; 0 if it is complete."""
    from argusrl.cli.cluster.watching import watch_run
    from argusrl.cluster.kube import connect

    return watch_run(connect(namespace=namespace), run)


def main(words: list[str]) -> int:
    """Submit, open the dashboard where the recipe has one, and watch; the exit code."""
    if not words or words[0].startswith("-"):
        print(__doc__)
        return 0 if words[:1] in (["--help"], ["-h"]) else 2
    try:
        name, place = submit(*words)
        section = load_config(Path(words[0]), words[1:]).config.cluster.kubernetes
        if section is not None and section.studio != "off":
            open_dashboard(name, place)
        return watch(name, place)
    except ArgusError as error:
        say_error(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
