"""What readings of a node mean: a pure function of them, so that a rule may be read, and tested, without a GPU.

An Xid is the GPU driver's number for what went wrong. 13 and 31 (and 43, 45, 68 that follow a fault of a program) are
the application's: no node is to blame for them. 48, 63, 64, 71, 74, 79, 94, 95, 109, 119, 120 and 140 point at the
device, its memory or its links. The others may be either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from argusrl.cluster.gpu_probe import Gpu
from argusrl.cluster.node_probe import Reading
from argusrl.journal.node_reports import Finding

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68})
HARDWARE_XIDS = frozenset({48, 63, 64, 71, 74, 79, 94, 95, 109, 119, 120, 140})

LEAST_FREE_SHARE = {"memory": 0.05, "disk": 0.05, "shm": 0.10}
MOST_CELSIUS = 90.0  # where the device does not say itself where it slows down
SLOW_STORAGE_SECONDS = 5.0
LONGEST_CLOCK_OFFSET_SECONDS = 2.0
_PLACES = {"memory": "memory", "disk": "the disk of the node", "shm": "/dev/shm"}


def cause_of_xid(number: int) -> str:
    """ "application", "hardware" or "unknown"."""
    if number in APPLICATION_XIDS:
        return "application"
    return "hardware" if number in HARDWARE_XIDS else "unknown"


@dataclass(slots=True)
class NodeHistory:
    """The findings about one node so far. What is over stays, with the time when it was seen last."""

    found: dict[tuple[str, str], Finding] = field(default_factory=dict)  # by kind and what it is about
    gpus: int = 0  # most that answered at once
    ecc: dict[int, int] = field(default_factory=dict)  # uncorrected errors by GPU when first seen

    def add(self, reading: Reading, clock_offset_seconds: float = 0.0, uncertain_seconds: float = 0.0) -> list[Finding]:
        """Take a reading; all findings, those of before included. The offset is this node's clock less the driver's."""
        if not self.ecc:
            self.ecc = {gpu.index: gpu.uncorrected_ecc or 0 for gpu in reading.gpus}
        for kind, about, cause, text, count in self._wrong(reading, clock_offset_seconds, uncertain_seconds):
            before = self.found.get((kind, about))
            total = count if kind == "ecc" else (before.count if before else 0) + count
            self.found[kind, about] = Finding(kind=kind, cause=cause, text=text, time=reading.time, count=total)
        self.gpus = max(self.gpus, sum(not gpu.lost for gpu in reading.gpus))
        return list(self.found.values())

    def _wrong(self, reading: Reading, offset: float, uncertain: float) -> Iterator[tuple[str, str, str, str, int]]:
        """(kind, what it is about, cause, sentence, how many times) of everything that is wrong."""
        for xid in reading.xids:
            yield "xid", f"{xid.gpu}/{xid.number}", cause_of_xid(xid.number), f"GPU {xid.gpu}: Xid {xid.number}", 1
        for gpu in reading.gpus:
            yield from self._wrong_gpu(gpu)
        answering = sum(not gpu.lost for gpu in reading.gpus)
        if answering < self.gpus:
            yield "device_lost", "", "hardware", f"{answering} of {self.gpus} GPUs answer", 1
        if reading.gpu_problem:
            yield "device_lost", "nvml", "unknown", reading.gpu_problem, 1
        yield from _scarce(reading)
        yield from _slow(reading)
        if abs(offset) > LONGEST_CLOCK_OFFSET_SECONDS + uncertain:
            yield "clock", "", "unknown", f"its clock is {offset:+.1f} s from the driver's", 1

    def _wrong_gpu(self, gpu: Gpu) -> Iterator[tuple[str, str, str, str, int]]:
        new = (gpu.uncorrected_ecc or 0) - self.ecc.get(gpu.index, 0)
        if new > 0:
            yield "ecc", str(gpu.index), "hardware", f"GPU {gpu.index}: {new} uncorrected memory errors", new
        limit = gpu.slowdown_celsius or MOST_CELSIUS
        if gpu.temperature_celsius is not None and gpu.temperature_celsius >= limit:
            text = f"GPU {gpu.index}: {gpu.temperature_celsius:.0f} °C, it slows down at {limit:.0f} °C"
            yield "temperature", str(gpu.index), "hardware", text, 1
        elif gpu.throttled:
            text = f"GPU {gpu.index} is slowed down: {', '.join(gpu.throttled)}"
            yield "temperature", str(gpu.index), "hardware", text, 1


def _scarce(reading: Reading) -> Iterator[tuple[str, str, str, str, int]]:
    for kind, share in LEAST_FREE_SHARE.items():
        free, total = getattr(reading, f"{kind}_free_bytes"), getattr(reading, f"{kind}_total_bytes")
        if free is not None and total and free < share * total:
            text = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB of {_PLACES[kind]} are free"
            yield kind, "", "resources", text, 1


def _slow(reading: Reading) -> Iterator[tuple[str, str, str, str, int]]:
    if reading.storage_error:
        yield "storage", "", "storage", f"the run root: {reading.storage_error}", 1
    elif (seconds := max(reading.storage_seconds or 0.0, reading.storage_waiting_seconds)) > SLOW_STORAGE_SECONDS:
        yield "storage", "", "storage", f"a small write to the run root took {seconds:.1f} s", 1


def measured(reading: Reading, clock_offset_seconds: float = 0.0) -> dict[str, float]:
    """The numbers of a reading by name with unit, for the report."""
    values: dict[str, float | None] = {
        "memory_free_bytes": reading.memory_free_bytes,
        "memory_total_bytes": reading.memory_total_bytes,
        "disk_free_bytes": reading.disk_free_bytes,
        "shm_free_bytes": reading.shm_free_bytes,
        "storage_seconds": reading.storage_seconds,
        "clock_offset_seconds": round(clock_offset_seconds, 3),
    }
    for gpu in reading.gpus:
        values[f"gpu{gpu.index}_temperature_celsius"] = gpu.temperature_celsius
        values[f"gpu{gpu.index}_uncorrected_ecc"] = gpu.uncorrected_ecc
    return {name: float(value) for name, value in values.items() if value is not None}
