"""The Jobs API that --address or --cluster means."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from argusrl.errors import ClusterError, ConfigError

if TYPE_CHECKING:
    from argusrl.cluster.kube import Kube
    from argusrl.cluster.ray_jobs import RayJobs


@contextmanager
def open_jobs(address: str) -> Iterator[RayJobs]:
    """By the address of a dashboard. Raises ClusterError."""
    from argusrl.cluster.ray_jobs import RayJobs

    jobs = RayJobs(address)
    try:
        yield jobs
    finally:
        jobs.close()


@contextmanager
def open_cluster_jobs(kube: Kube, cluster: str) -> Iterator[RayJobs]:
    """Of a RayCluster: by its service in the cluster, through the API server from outside. Raises ClusterError."""
    from argusrl.cluster.kinds import RAY_CLUSTER
    from argusrl.cluster.kube_api import NotFound, name_of
    from argusrl.cluster.ray_jobs import DASHBOARD_PORT, head_address

    try:
        found = kube.get(RAY_CLUSTER, cluster)
    except NotFound as error:
        there = ", ".join(name_of(one) for one in kube.list(RAY_CLUSTER).items) or "none"
        raise ClusterError(
            f"namespace {kube.namespace} has no RayCluster {cluster}", f"there are: {there}; --namespace names another"
        ) from error
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        way: AbstractContextManager[str] = nullcontext(head_address(found).removeprefix("http://"))
    else:
        pod = ((found.get("status") or {}).get("head") or {}).get("podName")
        if not pod:
            raise ClusterError(
                f"RayCluster {cluster} has no head pod yet", f"kubectl get pods -l ray.io/cluster={cluster}"
            )
        way = kube.forward(pod, DASHBOARD_PORT)
    with way as place, open_jobs(f"http://{place}") as jobs:
        yield jobs


def require_one(address: str | None, cluster: str | None) -> None:
    """Raises ConfigError where both are given."""
    if address is not None and cluster is not None:
        raise ConfigError("--address and --cluster name the same thing in two ways", "give one of them")
