"""How large pods are: what the recipe says, else what an instance of that type has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from argusrl.cluster.instances import Instance, instance
from argusrl.config.cluster_sections import HeadSection, NodeGroupSection, WorkersSection
from argusrl.errors import ConfigError

HEAD_CPUS = 8.0
HEAD_MEMORY_BYTES = 16 << 30

_LARGEST_OBJECT_STORE_BYTES = 32 << 30
_OTHER_SHARED_MEMORY_BYTES = 16 << 30  # of NCCL, torch and vLLM, beside the object store
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_UNITS |= {unit: 1 << (10 * power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)}


@dataclass(frozen=True, slots=True)
class PodSize:
    """What one pod asks for."""

    cpus: float
    memory_bytes: int
    gpus: int = 0
    efa: int = 0
    instance: Instance | None = None

    @property
    def resources(self) -> dict[str, dict[str, str]]:
        """Requests equal limits: pods that ask for all they may use are the last ones a node evicts."""
        amounts = {"cpu": cpu_quantity(self.cpus), "memory": memory_quantity(self.memory_bytes)}
        if self.gpus:
            amounts["nvidia.com/gpu"] = str(self.gpus)
        if self.efa:
            amounts["vpc.amazonaws.com/efa"] = str(self.efa)
        return {"requests": dict(amounts), "limits": dict(amounts)}


def head_size(section: HeadSection) -> PodSize:
    """The head's; 8 CPUs and 16 GiB where the recipe names neither an instance nor amounts. Raises ConfigError.

    A type that is not in the table chooses nodes and no more: then the recipe says how much a pod asks for.
    """
    given = section.cpus is not None and section.memory is not None
    known = _instance(section, "head: cpus and memory", given=given)
    cpus = section.cpus or (known.allocatable_cpus if known else HEAD_CPUS)
    memory_bytes = known.allocatable_bytes if known else HEAD_MEMORY_BYTES
    if section.memory is not None:
        memory_bytes = quantity_bytes(section.memory)
    return PodSize(cpus, memory_bytes, instance=known)


def worker_size(section: WorkersSection) -> PodSize:
    """A worker's: all of its node. Raises ConfigError when neither instance nor amounts say how much that is."""
    given = section.cpus is not None and section.memory is not None and section.gpus is not None
    known = _instance(section, "workers: cpus, memory and gpus", given=given)
    if known is None and not given:
        raise ConfigError("cluster.kubernetes.workers: name an instance type, or give cpus, memory and gpus")
    cpus = section.cpus or (known.allocatable_cpus if known else 0)
    memory_bytes = quantity_bytes(section.memory) if section.memory else (known.allocatable_bytes if known else 0)
    gpus = section.gpus if section.gpus is not None else (known.gpus if known else 0)
    efa = section.efa
    if efa is None:  # a single node has nobody to talk to
        efa = known.efa if known and section.nodes > 1 else 0
    return PodSize(cpus, memory_bytes, gpus, efa, known)


def object_store_bytes(memory_bytes: int) -> int:
    """Of a worker whose pod has so much memory.

    An adapter passes through it, or all weights in full-parameter training; never trajectories.
    """
    return min(memory_bytes // 10, _LARGEST_OBJECT_STORE_BYTES) >> 20 << 20


def shared_memory_bytes(memory_bytes: int) -> int:
    """Size of such a worker's /dev/shm; what lies there counts as the pod's memory."""
    return min(object_store_bytes(memory_bytes) + _OTHER_SHARED_MEMORY_BYTES, memory_bytes // 2)


def _instance(section: NodeGroupSection, amounts: str, *, given: bool) -> Instance | None:
    """What is known of the type; None without one, or where the recipe needs nothing of it."""
    if not section.instance:
        return None
    try:
        return instance(section.instance)
    except ConfigError as error:
        if given:
            return None
        raise ConfigError(
            error.message, f"{error.hint}; of another type give cluster.kubernetes.{amounts} of a pod"
        ) from error


def quantity_bytes(text: str) -> int:
    """An amount as Kubernetes writes it, in bytes: 16Gi is 17,179,869,184. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-zA-Z]*)", text)
    if found is None or found[2] not in _UNITS:
        raise ConfigError(f"{text} is no amount; write 16Gi, 500M or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2]])


def memory_quantity(size_bytes: int) -> str:
    """Bytes as Kubernetes writes them, in the largest unit that says it exactly."""
    for power, unit in ((3, "Gi"), (2, "Mi"), (1, "Ki")):
        if size_bytes % (1 << (10 * power)) == 0:
            return f"{size_bytes >> (10 * power)}{unit}"
    return str(size_bytes)


def cpu_quantity(cpus: float) -> str:
    """CPUs as Kubernetes writes them: 8, or 7500m."""
    return str(int(cpus)) if cpus == int(cpus) else f"{round(cpus * 1000)}m"
