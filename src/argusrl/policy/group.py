"""The process group of the ranks. When a rank dies, the others leave their group and meet again in a new one.

Every generation of the group has a store of its own, hosted by its rank 0: no generation outlives any of its ranks.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from argusrl.errors import ClusterError


def host_store(host: str = "127.0.0.1", port: int = 0) -> dist.TCPStore:
    """Start the rendezvous store in this process; `.port` is the bound port. It lives as long as the object."""
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)


def connect(
    *, rank: int, world: int, host: str, port: int, name: str, device: str = "cpu", timeout_seconds: float = 600.0
) -> None:
    """Join the group `name` at the store. A name is used once: survivors of a fault meet again under a new one.

    Leaves the group this process is in, if any. Raises ClusterError where the store or a rank does not answer.
    """
    disconnect()
    timeout = timedelta(seconds=timeout_seconds)
    backend = "gloo"
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first use of cuBLAS
        torch.cuda.set_device(0)  # an actor sees its own GPU only
        backend = "cpu:gloo,cuda:nccl"
    try:
        store = dist.PrefixStore(name, dist.TCPStore(host, port, is_master=False, timeout=timeout))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except dist.DistError as error:
        raise ClusterError(
            f"rank {rank} of {world} could not join the group {name} at {host}:{port}: {error}",
            "check that all ranks started and that this address is reachable from them",
        ) from error


def disconnect() -> None:
    """Leave the process group; nothing happens where there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
