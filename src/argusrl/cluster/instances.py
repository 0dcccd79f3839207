"""Instance types that runs are planned on: what a node has, and what its GPUs can do at most.

Sizes of instances are those of EC2's DescribeInstanceTypes; all of them exist as HyperPod instances (`ml.<name>`).
Peaks are of dense bfloat16 products with float32 sums, and of device memory, from NVIDIA's data sheets (A100, H100,
H200, A10G, L4, L40S, RTX PRO 6000 Blackwell Server Edition; HGX B200 and B300). Nothing runs at its peak: what share
of it counts is an assumption of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from argusrl.errors import ConfigError

ALLOCATABLE_SHARE = 0.93
"""Of a node's CPUs and memory, what pods may ask for; kubelet and system keep the rest."""

_GIB = 2**30
_GB = 10**9


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    flops: float  # per second, dense bfloat16
    bandwidth_bytes: float  # of its memory, per second


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance type. `name` has no `ml.`; a head has no GPUs."""

    name: str
    gpus: int
    gpu: Gpu | None
    gpu_bytes: int  # of one GPU, nameplate
    cpus: int
    memory_bytes: int
    efa: int  # interfaces
    nvme_bytes: int  # local disks, 0 without
    network_bytes: float  # per second

    @property
    def hyperpod_name(self) -> str:
        """As HyperPod and its node labels write it."""
        return f"ml.{self.name}"

    @property
    def allocatable_cpus(self) -> int:
        """What one pod that has the node to itself may ask for."""
        return int(self.cpus * ALLOCATABLE_SHARE)

    @property
    def allocatable_bytes(self) -> int:
        """Memory that one pod that has the node to itself may ask for, in whole GiB."""
        return int(self.memory_bytes * ALLOCATABLE_SHARE) // _GIB * _GIB


_A100 = Gpu("A100 40GB", 312e12, 1.555e12)
_A100_80 = Gpu("A100 80GB", 312e12, 2.039e12)
_H100 = Gpu("H100", 989e12, 3.35e12)
_H200 = Gpu("H200", 989e12, 4.8e12)
_B200 = Gpu("B200", 2250e12, 7.7e12)
_B300 = Gpu("B300", 2250e12, 7.7e12)
_A10G = Gpu("A10G", 70e12, 0.6e12)
_L4 = Gpu("L4", 121e12, 0.3e12)
_L40S = Gpu("L40S", 362e12, 0.864e12)
_RTX_PRO = Gpu("RTX PRO 6000", 503e12, 1.597e12)

# name, GPUs, GPU, GiB of one, CPUs, memory GiB, EFA, NVMe GB, network Gbit/s
_ROWS: tuple[tuple[str, int, Gpu | None, float, int, int, int, int, float], ...] = (
    ("p4d.24xlarge", 8, _A100, 40, 96, 1152, 4, 8000, 400),
    ("p4de.24xlarge", 8, _A100_80, 80, 96, 1152, 4, 8000, 400),
    ("p5.4xlarge", 1, _H100, 80, 16, 256, 1, 3800, 100),
    ("p5.48xlarge", 8, _H100, 80, 192, 2048, 32, 30400, 3200),
    ("p5e.48xlarge", 8, _H200, 141, 192, 2048, 32, 30400, 3200),
    ("p5en.48xlarge", 8, _H200, 141, 192, 2048, 16, 30400, 3200),
    ("p6-b200.48xlarge", 8, _B200, 179.1, 192, 2048, 8, 30400, 3200),
    ("p6-b300.48xlarge", 8, _B300, 268.6, 192, 4096, 16, 30400, 6400),
    ("g5.12xlarge", 4, _A10G, 22.4, 48, 192, 1, 3800, 40),
    ("g5.48xlarge", 8, _A10G, 22.4, 192, 768, 1, 7600, 100),
    ("g6.12xlarge", 4, _L4, 22.4, 48, 192, 1, 3760, 40),
    ("g6.48xlarge", 8, _L4, 22.4, 192, 768, 1, 7520, 100),
    ("g6e.12xlarge", 4, _L40S, 44.7, 48, 384, 1, 3800, 100),
    ("g6e.48xlarge", 8, _L40S, 44.7, 192, 1536, 4, 7600, 400),
    ("g7e.12xlarge", 2, _RTX_PRO, 96, 48, 512, 1, 3800, 400),
    ("g7e.48xlarge", 8, _RTX_PRO, 96, 192, 2048, 4, 15200, 1600),
    ("m5.4xlarge", 0, None, 0, 16, 64, 0, 0, 10),
    ("m5.8xlarge", 0, None, 0, 32, 128, 0, 0, 10),
    ("m5.16xlarge", 0, None, 0, 64, 256, 0, 0, 20),
    ("m6i.8xlarge", 0, None, 0, 32, 128, 0, 0, 12.5),
    ("m7i.8xlarge", 0, None, 0, 32, 128, 0, 0, 12.5),
    ("r6i.8xlarge", 0, None, 0, 32, 256, 0, 0, 12.5),
    ("r6i.16xlarge", 0, None, 0, 64, 512, 0, 0, 25),
    ("r7i.8xlarge", 0, None, 0, 32, 256, 0, 0, 12.5),
    ("r7i.16xlarge", 0, None, 0, 64, 512, 0, 0, 25),
    ("r5d.16xlarge", 0, None, 0, 64, 512, 0, 2400, 20),
)

INSTANCES: dict[str, Instance] = {
    name: Instance(name, gpus, gpu, int(gpu_gib * _GIB), cpus, gib * _GIB, efa, nvme_gb * _GB, gbit * _GB / 8)
    for name, gpus, gpu, gpu_gib, cpus, gib, efa, nvme_gb, gbit in _ROWS
}
"""By name without `ml.`."""


def instance(name: str) -> Instance:
    """The type of that name, with or without `ml.`. Raises ConfigError for a name that is not in the table."""
    bare = name.strip().removeprefix("ml.")
    if found := INSTANCES.get(bare):
        return found
    near = get_close_matches(bare, INSTANCES, n=1, cutoff=0.5)
    raise ConfigError(
        f"instance type {name!r} is not known",
        (f"did you mean ml.{near[0]}? " if near else "") + f"known: {', '.join(INSTANCES)}",
    )
