"""The head's pod and the workers': containers, volumes, and the nodes they go to."""

from __future__ import annotations

from typing import Any

from argusrl.cluster.manifests.access import DASHBOARD_PORT, GCS_PORT, METRICS_PORT
from argusrl.cluster.manifests.environment import head_variables, spill_folder, worker_variables
from argusrl.cluster.manifests.placement import head_placement, worker_placement
from argusrl.cluster.manifests.recipe import PodFiles, map_name
from argusrl.cluster.manifests.setup import COMPONENT_LABEL, HOME, NVME_MOUNT, RECIPE_FOLDER, Setup
from argusrl.cluster.manifests.sizes import PodSize, memory_quantity, shared_memory_bytes
from argusrl.cluster.manifests.storage import VOLUME
from argusrl.config.cluster_sections import NodeGroupSection
from argusrl.journal.drains import DRAIN_SECONDS

Object = dict[str, Any]

HEAD_OBJECT_STORE_BYTES = 1 << 30
"""Nothing is put there: ranks and engines exchange through the run folder."""

GRACE_SECONDS = int(DRAIN_SECONDS) + 15
"""Drain first, then Ray's own end."""

_INIT_SIZE = PodSize(1, 1 << 30)


def head_pod(setup: Setup, files: PodFiles) -> Object:
    """Template of the pod with Ray's head, the supervisor and the driver."""
    container = _container(setup, "ray-head", setup.head)
    container["env"] = head_variables(setup)
    container["ports"] = [
        {"name": name, "containerPort": port}
        for name, port in (("gcs-server", GCS_PORT), ("dashboard", DASHBOARD_PORT), ("metrics", METRICS_PORT))
    ]
    shared_memory_bytes = 2 * HEAD_OBJECT_STORE_BYTES
    return _template(
        setup,
        "head",
        setup.kubernetes.head,
        container,
        _volumes(setup, files, shared_memory_bytes),
        head_placement(setup),
    )


def worker_pod(setup: Setup, files: PodFiles) -> Object:
    """Template of the pods with ranks, engines and episode workers: one on each node, with all its GPUs."""
    container = _container(setup, "ray-worker", setup.workers)
    container["env"] = worker_variables(setup)
    container["ports"] = [{"name": "metrics", "containerPort": METRICS_PORT}]
    volumes = _volumes(setup, files, shared_memory_bytes(setup.workers.memory_bytes))
    init: list[Object] = []
    if setup.nvme is not None:
        path = str(setup.nvme / f"argusrl-{setup.kubernetes.volume.uid}")  # one user's files never block another's
        volumes.append({"name": "nvme", "hostPath": {"path": path, "type": "DirectoryOrCreate"}})
        container["volumeMounts"].append({"name": "nvme", "mountPath": str(NVME_MOUNT)})
        init = [_prepare_disk(setup), _stage_weights(setup)]
        if setup.weights_key is not None:  # the recipe's path shows the copy: nothing else has to know of it
            container["volumeMounts"].append(
                {
                    "name": "nvme",
                    "mountPath": setup.config.model.path,
                    "subPath": f"weights/{setup.weights_key}",
                    "readOnly": True,
                }
            )
    template = _template(setup, "worker", setup.kubernetes.workers, container, volumes, worker_placement(setup))
    if init:
        template["spec"]["initContainers"] = init
    return template


def _template(
    setup: Setup, component: str, group: NodeGroupSection, container: Object, volumes: list[Object], placement: Object
) -> Object:
    volume, secrets = setup.kubernetes.volume, setup.kubernetes.image_pull_secrets
    spec: Object = {
        "serviceAccountName": setup.run,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": volume.uid,
            "runAsGroup": volume.gid,
            "fsGroup": volume.gid,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in secrets]
    spec |= placement
    spec["containers"] = [container]
    spec["volumes"] = volumes
    return {
        "metadata": {
            "labels": {**group.labels, **setup.labels, COMPONENT_LABEL: component},
            "annotations": {
                **setup.folder_annotation,
                "karpenter.sh/do-not-disrupt": "true",
                "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            },
        },
        "spec": spec,
    }


def _container(setup: Setup, name: str, size: PodSize) -> Object:
    return {
        "name": name,
        "image": setup.kubernetes.image,
        "resources": size.resources,
        "lifecycle": {"preStop": {"exec": {"command": ["argusrl", "drain", "--wait"]}}},
        "securityContext": _confined(),
        "volumeMounts": [
            {"name": VOLUME, "mountPath": str(setup.kubernetes.volume.mount)},
            {"name": "recipe", "mountPath": str(RECIPE_FOLDER), "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "ray", "mountPath": "/tmp/ray"},
            {"name": "home", "mountPath": str(HOME)},
        ],
    }


def _volumes(setup: Setup, files: PodFiles, shm_bytes: int) -> list[Object]:
    return [
        {"name": VOLUME, "persistentVolumeClaim": {"claimName": setup.kubernetes.volume.claim}},
        {"name": "recipe", "configMap": {"name": map_name(setup, files), "items": files.items}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": memory_quantity(shm_bytes)}},
        {"name": "ray", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
    ]


def _confined() -> Object:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _prepare_disk(setup: Setup) -> Object:
    """The host's folder belongs to root when it is made; this one command of root gives it to the run's user."""
    volume = setup.kubernetes.volume
    return {
        "name": "own-nvme",
        "image": setup.kubernetes.image,
        "command": ["chown", f"{volume.uid}:{volume.gid}", str(NVME_MOUNT)],
        "resources": _INIT_SIZE.resources,
        "securityContext": {
            "runAsNonRoot": False,
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
        },
        "volumeMounts": [{"name": "nvme", "mountPath": str(NVME_MOUNT)}],
    }


def _stage_weights(setup: Setup) -> Object:
    command = ["python", "-m", "argusrl.cluster.node_disk", "--spill", spill_folder(setup)]
    if setup.weights_key is not None:
        command += ["--weights", setup.config.model.path, "--copy", str(NVME_MOUNT / "weights" / setup.weights_key)]
    return {
        "name": "stage-weights",
        "image": setup.kubernetes.image,
        "command": command,
        "resources": _INIT_SIZE.resources,
        "securityContext": _confined(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": VOLUME, "mountPath": str(setup.kubernetes.volume.mount), "readOnly": True},
            {"name": "nvme", "mountPath": str(NVME_MOUNT)},
        ],
    }
