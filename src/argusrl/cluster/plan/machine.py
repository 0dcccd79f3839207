"""What a plan is made for: nodes of an instance type, nodes with GPUs of a given size, or this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from argusrl.cluster.instances import INSTANCES, Gpu, instance
from argusrl.cluster.manifests.sizes import HEAD_MEMORY_BYTES, head_size, quantity_bytes, shared_memory_bytes
from argusrl.config.cluster_sections import VolumeSection, WorkersSection
from argusrl.config.sections import Config
from argusrl.errors import ConfigError

_CORE_FLOPS, _CPU_BANDWIDTH = 5e10, 1e10  # of float32 on a core of a server, and of its memory; assumed
_TOOL_SECONDS = 10.0
_ANOTHER_TYPE = (
    "of another type give cluster.kubernetes.workers.instance, .gpus, .cpus and .memory in the recipe, and --gpu-gib"
)
_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """The shared storage. None where it is not known, as on a local disk."""

    capacity: int | None  # bytes; of a local disk: what is free
    throughput: float | None  # bytes per second
    metadata_iops: int | None
    source: str

    @classmethod
    def of(cls, volume: VolumeSection) -> FileSystem:
        """FSx for Lustre as the recipe describes it: its throughput grows with its size."""
        capacity = quantity_bytes(volume.capacity)
        throughput = capacity / 2**40 * volume.throughput_mb_per_tib * 1e6
        return cls(
            capacity=capacity,
            throughput=throughput,
            metadata_iops=volume.metadata_iops,
            source="cluster.kubernetes.volume",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Nodes that are all alike, a head, and storage. Sizes in bytes; None: not known, so nothing is refused."""

    name: str
    instance: str | None  # type of the worker nodes
    device: Literal["cpu", "cuda"]
    nodes: int
    slots_per_node: int  # GPUs, or slots on CPU
    gpu: Gpu | None
    gpu_bytes: int | None
    node_bytes: int | None  # host memory that the workers of a node may have
    shared_memory_bytes: int | None  # /dev/shm of a node
    network_bytes: float | None  # per second, of a node
    head_bytes: int | None  # host memory of the head's pod
    separate_head: bool  # on a node of its own
    storage: FileSystem

    @property
    def slots(self) -> int:
        return self.nodes * self.slots_per_node

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "slots": self.slots}


def machine_of(
    config: Config,
    *,
    instance_name: str | None = None,
    nodes: int | None = None,
    gpu_gib: float | None = None,
) -> Machine:
    """What the command line says, else the recipe, else this machine. Raises ConfigError.

    `gpu_gib` replaces the GPUs alone: nodes, host memory and head stay those of the recipe.
    """
    workers = config.cluster.kubernetes.workers if config.cluster.kubernetes is not None else None
    own = workers.instance if workers is not None else None
    name = instance_name or own
    if workers is not None and workers.gpus and name == own and not _in_table(name):
        return _of_pods(config, workers, nodes, gpu_gib)
    if name is not None:
        found = _of_instances(config, name, nodes)
        return found if gpu_gib is None else _with_gpus(found, gpu_gib)
    if nodes is not None:
        raise ConfigError("--nodes needs to know what a node is", "give --instance ml.g7e.12xlarge, say")
    slots = config.cluster.slots or 1
    if gpu_gib is not None or _has_gpus(config):
        return Machine(
            name=f"{slots} GPUs of " + ("unknown size" if gpu_gib is None else f"{gpu_gib:g} GiB"),
            instance=None,
            device="cuda",
            nodes=1,
            slots_per_node=slots,
            gpu=None,
            gpu_bytes=None if gpu_gib is None else int(gpu_gib * 2**30),
            node_bytes=None,
            shared_memory_bytes=None,
            network_bytes=None,
            head_bytes=None,
            separate_head=False,
            storage=storage_of(config, here=gpu_gib is None),
        )
    return this_machine(config)


def _in_table(name: str | None) -> bool:
    return name is not None and name.removeprefix("ml.") in INSTANCES


def _with_gpus(machine: Machine, gpu_gib: float) -> Machine:
    """The same nodes with GPUs of that size, whose speed is not known."""
    return replace(
        machine, name=f"{machine.name} with GPUs of {gpu_gib:g} GiB", gpu=None, gpu_bytes=int(gpu_gib * 2**30)
    )


def _of_pods(config: Config, workers: WorkersSection, nodes: int | None, gpu_gib: float | None) -> Machine:
    """Nodes of a type that is not in the table, or of none: all that is known of them is what their pods ask for."""
    count, gpus = nodes or workers.nodes, workers.gpus or 0
    pod = quantity_bytes(workers.memory) if workers.memory else None
    found = Machine(
        name=f"{count} × {workers.instance or f'nodes of {gpus} GPUs'}",
        instance=workers.instance,
        device="cuda",
        nodes=count,
        slots_per_node=gpus,
        gpu=None,
        gpu_bytes=None,
        node_bytes=pod,
        shared_memory_bytes=None if pod is None else shared_memory_bytes(pod),
        network_bytes=None,
        head_bytes=_head_bytes(config),
        separate_head=True,
        storage=storage_of(config, here=False),
    )
    return found if gpu_gib is None else _with_gpus(found, gpu_gib)


def _has_gpus(config: Config) -> bool:
    """By the recipe alone, for machines that are elsewhere or have no GPU that could be asked."""
    cluster = config.cluster
    return cluster.device != "cpu" and (cluster.address != "local" or (cluster.device == "cuda" and not local_gpus()))


def this_machine(config: Config) -> Machine:
    """The GPUs, else the CPUs, and the memory that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    found = local_gpus() if config.cluster.device != "cpu" else []
    slots = config.cluster.slots or max(1, len(found))
    return Machine(
        name=f"this machine, {len(found)} × {found[0][0]}" if found else f"this machine, {cores} CPUs",
        instance=None,
        device="cuda" if found else "cpu",
        nodes=1,
        slots_per_node=slots,
        gpu=gpu_named(found[0][0]) if found else Gpu("CPU core", _CORE_FLOPS, _CPU_BANDWIDTH / slots),
        gpu_bytes=min(size for _, size in found) if found else None,
        node_bytes=_available_bytes(),
        shared_memory_bytes=_free_bytes(Path("/dev/shm")),
        network_bytes=None,
        head_bytes=None,
        separate_head=False,
        storage=storage_of(config, here=True),
    )


def local_gpus() -> list[tuple[str, int]]:
    """(name, bytes) of the NVIDIA GPUs of this machine, by its driver's own tool; [] where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True).stdout
        rows = [line.rpartition(",") for line in lines.splitlines() if line.strip()]
        return [(name.strip(), int(size) << 20) for name, _, size in rows]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def gpu_named(name: str) -> Gpu | None:
    """The GPU of an instance type that this name belongs to: "NVIDIA H200" is an H200."""
    kinds = {kind.gpu for kind in INSTANCES.values() if kind.gpu is not None}
    words = set(name.replace("-", " ").split())
    return next((gpu for gpu in kinds if words.issuperset(gpu.name.split())), None)


def _of_instances(config: Config, name: str, nodes: int | None) -> Machine:
    kubernetes = config.cluster.kubernetes
    workers = kubernetes.workers if kubernetes is not None else None
    try:
        kind = instance(name)
    except ConfigError as error:
        raise ConfigError(error.message, f"{error.hint}; {_ANOTHER_TYPE}") from error
    if not kind.gpus or kind.gpu is None:
        raise ConfigError(f"{kind.hyperpod_name} has no GPU", "ranks and engines need one; ml.g7e.12xlarge has two")
    own = workers.instance if workers is not None else None
    same = own is not None and own.removeprefix("ml.") == kind.name
    gpus = (workers.gpus if same and workers is not None else None) or kind.gpus
    count = nodes or (workers.nodes if workers is not None else None) or -(-(config.cluster.slots or 1) // gpus)
    memory = quantity_bytes(workers.memory) if same and workers is not None and workers.memory else None
    pod = memory or kind.allocatable_bytes
    return Machine(
        name=f"{count} × {kind.hyperpod_name}",
        instance=kind.hyperpod_name,
        device="cuda",
        nodes=count,
        slots_per_node=gpus,
        gpu=kind.gpu,
        gpu_bytes=kind.gpu_bytes,
        node_bytes=pod,
        shared_memory_bytes=shared_memory_bytes(pod),
        network_bytes=kind.network_bytes,
        head_bytes=_head_bytes(config),
        separate_head=True,
        storage=storage_of(config, here=False),
    )


def _head_bytes(config: Config) -> int:
    kubernetes = config.cluster.kubernetes
    return HEAD_MEMORY_BYTES if kubernetes is None else head_size(kubernetes.head).memory_bytes


def storage_of(config: Config, *, here: bool) -> FileSystem:
    """The recipe's file system, else the disk below run.root, if that is `here`."""
    kubernetes = config.cluster.kubernetes
    if kubernetes is not None:
        return FileSystem.of(kubernetes.volume)
    root = config.run.root.expanduser().absolute()
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    if not here or config.cluster.address != "local":  # the root lies on other machines
        return FileSystem(capacity=None, throughput=None, metadata_iops=None, source="not known")
    return FileSystem(capacity=_free_bytes(there), throughput=None, metadata_iops=None, source=f"free in {there}")


def _free_bytes(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _available_bytes() -> int | None:
    """Memory that can still be had here: of the machine, and of the control group this process is in."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    limit, used = _number(_GROUP / "memory.max"), _number(_GROUP / "memory.current")
    if limit is None or used is None:
        return available
    left = limit - used + _page_cache()
    return left if available is None else min(left, available)


def _page_cache() -> int:
    """Of the control group: counted as used, and given back when it is needed."""
    try:
        lines = (_GROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
