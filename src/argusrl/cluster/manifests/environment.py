"""Environment variables of a run's pods: who and where they are, how Ray keeps its memory, how GPUs talk."""

from __future__ import annotations

from typing import Any

from argusrl.cluster.manifests.setup import HOME, NVME_MOUNT, Setup
from argusrl.cluster.names import (
    HOST_VARIABLE,
    NODE_VARIABLE,
    POD_VARIABLE,
    RUN_FOLDER_VARIABLE,
    SUBMISSION_LABEL,
    SUBMISSION_VARIABLE,
)

Variables = list[dict[str, Any]]

_FIELDS = {
    POD_VARIABLE: "metadata.name",
    SUBMISSION_VARIABLE: f"metadata.labels['{SUBMISSION_LABEL}']",
    "POD_IP": "status.podIP",
    "POD_NAMESPACE": "metadata.namespace",
    NODE_VARIABLE: "spec.nodeName",
    HOST_VARIABLE: "status.hostIP",
    "HYPERPOD_JMA_HOST": "status.hostIP",  # where HyperPod's job monitoring agent listens
}
_RDMA_FAMILIES = ("p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300")  # GPUs and EFA exchange data directly
_NO_RDMA_FAMILIES = ("g5", "g6", "g6e")


def head_variables(setup: Setup) -> Variables:
    """Of the pod with Ray's head and the driver."""
    failures = {  # a node that is silent for about twenty seconds is lost; Ray's own defaults take about a minute
        "RAY_health_check_period_ms": "3000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "4",
    }
    return [*_common(setup), *_plain(failures)]


def worker_variables(setup: Setup) -> Variables:
    """Of the pods with ranks and engines."""
    values = {"RAY_worker_register_timeout_seconds": "600"}  # the first import on a cold node takes its time
    if setup.nvme is not None:
        values["RAY_object_spilling_directory"] = f"{spill_folder(setup)}/$(POD_NAME)"
        values["VLLM_CACHE_ROOT"] = str(NVME_MOUNT / "cache" / "vllm")  # compiled kernels outlive the pod
        values["TRITON_CACHE_DIR"] = str(NVME_MOUNT / "cache" / "triton")
    return [*_common(setup), *_plain(values | _fabric(setup))]


def spill_folder(setup: Setup) -> str:
    """Where the run's pods on a node spill objects, one folder a pod."""
    return str(NVME_MOUNT / "spill" / setup.run)


def _common(setup: Setup) -> Variables:
    mount = setup.kubernetes.volume.mount
    downward = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in _FIELDS.items()]
    values = {
        RUN_FOLDER_VARIABLE: str(setup.run_folder),
        "HOME": str(HOME),
        "USER": "argusrl",  # some libraries ask for a name, and the user id may have none in the image
        "RAY_USAGE_STATS_ENABLED": "0",
        # One worker that grows too large is killed by Ray; at the limit itself the kernel would kill the whole pod.
        "RAY_memory_usage_threshold": "0.95",
        "RAY_memory_monitor_refresh_ms": "250",
    }
    if not setup.config.model.path.startswith("/"):
        values["HF_HOME"] = str(mount / "argusrl" / "huggingface")  # one download for all nodes and runs
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": dict(zip(("name", "key"), reference.split("/"), strict=True))}}
        for name, reference in sorted(setup.kubernetes.secrets.items())
    ]
    return [*downward, *_plain(values), *secrets]


def _fabric(setup: Setup) -> dict[str, str]:
    """NCCL's, by what connects the nodes."""
    if setup.workers.gpus == 0:
        return {}
    values = {"NCCL_SOCKET_IFNAME": "^docker,lo,veth"}
    if setup.workers.efa:
        values |= {"FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1", "RDMAV_FORK_SAFE": "1", "NCCL_NET_PLUGIN": "ofi"}
        family = setup.workers.instance.name.partition(".")[0] if setup.workers.instance else ""
        if family in _RDMA_FAMILIES:
            values["FI_EFA_USE_DEVICE_RDMA"] = "1"
        if family in _NO_RDMA_FAMILIES:
            values |= {"FI_EFA_USE_DEVICE_RDMA": "0", "NCCL_PROTO": "simple"}
    return values


def _plain(values: dict[str, str]) -> Variables:
    return [{"name": name, "value": value} for name, value in values.items()]
