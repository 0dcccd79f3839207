"""What a probe reads on its node: memory, disk, /dev/shm, GPUs, and how long the run root takes for a small write."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from argusrl.cluster.gpu_probe import Gpu, GpuProbe, Xid
from argusrl.cluster.names import NODE_VARIABLE, POD_VARIABLE

_CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")
_SAMPLE_BYTES = 4096
_KUBERAY_POD_VARIABLE = "RAY_CLOUD_INSTANCE_ID"  # in every pod of a RayCluster, whoever made it


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at a node. Sizes are bytes, None where nothing tells."""

    time: float  # seconds since 1970, by the clock of this node
    host: str = ""
    pod: str = ""
    node: str = ""  # Kubernetes node
    memory_total_bytes: int | None = None  # of the pod, where it has a limit
    memory_free_bytes: int | None = None
    disk_total_bytes: int | None = None  # where Ray keeps logs and spills objects
    disk_free_bytes: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    storage_seconds: float | None = None  # of the last write that ended
    storage_waiting_seconds: float = 0.0  # of one that has not ended
    storage_error: str = ""
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str = ""
    xids: tuple[Xid, ...] = ()  # since the reading before


@dataclass(slots=True)
class NodeProbe:
    """Reads this node. `root` is a folder on the storage of the run, `scratch` one on the node's own disk."""

    root: Path
    scratch: Path
    gpus: GpuProbe = field(default_factory=GpuProbe.open)
    storage: StorageClock = field(init=False)

    def __post_init__(self) -> None:
        self.storage = StorageClock(self.root)

    def read(self) -> Reading:
        """One reading; begins the next write to the run root, which nobody waits for."""
        total, free = memory_bytes()
        disk, shm = space_bytes(self.scratch), space_bytes(_SHM)
        self.storage.begin()
        return Reading(
            time=time.time(),
            host=socket.gethostname(),
            pod=os.environ.get(POD_VARIABLE) or os.environ.get(_KUBERAY_POD_VARIABLE, ""),
            node=os.environ.get(NODE_VARIABLE, ""),
            memory_total_bytes=total,
            memory_free_bytes=free,
            disk_total_bytes=disk[0],
            disk_free_bytes=disk[1],
            shm_total_bytes=shm[0],
            shm_free_bytes=shm[1],
            storage_seconds=self.storage.last_seconds,
            storage_waiting_seconds=self.storage.waiting_seconds(),
            storage_error=self.storage.error,
            gpus=self.gpus.gpus(),
            gpu_problem=self.gpus.problem,
            xids=self.gpus.xids(),
        )


class StorageClock:
    """Times small durable writes to a folder in a thread of its own: storage that hangs must not hang the probe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last_seconds: float | None = None
        self.error = ""
        self._begun: float | None = None

    def begin(self) -> None:
        """Begin a write, unless one is under way."""
        if self._begun is None:
            self._begun = time.monotonic()
            threading.Thread(target=self._write, name="storage clock", daemon=True).start()

    def waiting_seconds(self) -> float:
        """For how long a write has been under way; 0 while there is none."""
        begun = self._begun
        return 0.0 if begun is None else time.monotonic() - begun

    def _write(self) -> None:
        began = time.monotonic()
        path = self.folder / f".probe.{socket.gethostname()}.{os.getpid()}.tmp"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.write(descriptor, bytes(_SAMPLE_BYTES))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self.last_seconds, self.error = time.monotonic() - began, ""
        except OSError as error:
            self.error = error.strerror or str(error)
        finally:
            with suppress(OSError):
                path.unlink()
            self._begun = None


def memory_bytes(cgroup: Path = _CGROUP) -> tuple[int, int]:
    """(all, free) of the container where it has a limit, else of the machine; memory of the page cache is free."""
    machine = psutil.virtual_memory()
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        cached = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used -= int(cached.get("inactive_file", 0))
    except (OSError, ValueError):  # no limit reads "max"
        return int(machine.total), int(machine.available)
    return min(limit, int(machine.total)), max(0, min(limit - used, int(machine.available)))


def space_bytes(folder: Path) -> tuple[int | None, int | None]:
    """(all, free) of the file system of a folder; nothing where there is none."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
