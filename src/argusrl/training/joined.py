"""The machine that a Ray cluster is, by what its nodes say of themselves: for the plan of a run that joined it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from argusrl.cluster.instances import INSTANCES
from argusrl.cluster.plan.machine import Machine, machine_of, storage_of
from argusrl.config.sections import Config

_ACCELERATOR = "accelerator_type:"


def machine_of_nodes(config: Config, nodes: Sequence[Mapping[str, Any]]) -> Machine:
    """Of ray.nodes(): those that can hold ranks and engines. The recipe's instance type, if it has one, says more."""
    if config.cluster.kubernetes is not None and config.cluster.kubernetes.workers.instance is not None:
        return machine_of(config)
    living = [node["Resources"] for node in nodes if node["Alive"]]
    with_gpus = [resources for resources in living if resources.get("GPU", 0) >= 1]
    cuda = bool(with_gpus) and config.cluster.device != "cpu"
    workers = with_gpus if cuda else [resources for resources in living if resources.get("CPU", 0) >= 1]
    slots = config.cluster.slots or (int(sum(one["GPU"] for one in workers)) if cuda else 1)
    stores = [int(one["object_store_memory"]) for one in workers if "object_store_memory" in one]
    memories = [int(one["memory"] + one["object_store_memory"]) for one in workers if "memory" in one]
    count = max(1, len(workers))
    return Machine(
        name=f"{count} nodes of this Ray cluster",
        instance=None,
        device="cuda" if cuda else "cpu",
        nodes=count,
        slots_per_node=-(-slots // count),
        gpu=None,
        gpu_bytes=_gpu_bytes(workers) if cuda else None,
        node_bytes=min(memories, default=None),
        shared_memory_bytes=min(stores, default=None),
        network_bytes=None,
        head_bytes=None,
        separate_head=False,
        storage=storage_of(config, here=False),
    )


def _gpu_bytes(nodes: Sequence[Mapping[str, Any]]) -> int | None:
    """Of the smallest GPU, if Ray names a kind that is known; the largest of its kind, so that nothing is refused
    that might fit."""
    kinds = {name.removeprefix(_ACCELERATOR) for one in nodes for name in one if name.startswith(_ACCELERATOR)}
    sizes = [
        max((one.gpu_bytes for one in INSTANCES.values() if one.gpu and one.gpu.name.split()[0] == kind), default=0)
        for kind in kinds
    ]
    return min(sizes) if sizes and all(sizes) else None
