"""What KubeRay, scheduler and kubelets put beside a RayJob that was created, without any of them."""

from __future__ import annotations

from typing import Any

from fakes.kubernetes_api import Store

Object = dict[str, Any]


def node(name: str, *, ready: bool = True, gpus: int = 2, efa: int = 1, **labels: str) -> Object:
    """A HyperPod node with GPUs."""
    instance = {"node.kubernetes.io/instance-type": "ml.g7e.12xlarge"}
    aws = {f"sagemaker.amazonaws.com/{key.replace('_', '-')}": value for key, value in labels.items()}
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {**instance, **aws}},
        "status": {
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
            "allocatable": {"nvidia.com/gpu": str(gpus), "vpc.amazonaws.com/efa": str(efa)},
        },
    }


def start(store: Store, job: Object, nodes: list[str], *, phase: str = "Running") -> list[Object]:
    """Set a RayJob running: its status, its RayCluster, a head pod on the first node and a worker on each other one."""
    meta = job["metadata"]
    space, cluster = meta["namespace"], f"{meta['name']}-cluster"
    status = {"jobDeploymentStatus": phase, "jobStatus": "RUNNING", "rayClusterName": cluster}
    store.seed({**job, "status": status})
    owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "blockOwnerDeletion": True}
    owner |= {"name": meta["name"], "uid": meta["uid"]}
    made = store.seed(
        {
            "kind": "RayCluster",
            "metadata": {
                "name": cluster,
                "namespace": space,
                "ownerReferences": [owner],
            },
            "spec": job["spec"]["rayClusterSpec"],
            "status": {"state": "ready", "head": {"podName": f"{cluster}-head"}},
        }
    )
    pods = []
    for place, name in enumerate(nodes):
        role = "worker" if place else "head"
        pods.append(
            store.seed(pod(f"{cluster}-{role}{place or ''}", space, role, name, made, meta.get("labels") or {}))
        )
    return pods


def pod(name: str, space: str, role: str, node_name: str, cluster: Object, labels: dict[str, str]) -> Object:
    """A pod of a RayCluster that runs."""
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "blockOwnerDeletion": True}
    owner |= {"name": cluster["metadata"]["name"], "uid": cluster["metadata"]["uid"]}
    ray = {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/node-type": role}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": space, "labels": {**labels, **ray}, "ownerReferences": [owner]},
        "spec": {"nodeName": node_name, "containers": [{"name": "ray", "image": "argusrl:1"}]},
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": "ray", "ready": True, "restartCount": 0, "state": {"running": {}}}],
        },
    }
