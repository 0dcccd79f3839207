"""What a probe on each node of a run finds, in one file that the driver replaces in place for everybody else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from argusrl.storage.files import read_file
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import replace_file


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong with a node, or was."""

    kind: str  # "xid" | "ecc" | "device_lost" | "temperature" | "memory" | "disk" | "shm" | "storage" | "clock"
    cause: str  # "hardware" | "application" | "storage" | "resources" | "unknown"
    text: str  # one sentence, with the values
    time: float  # seconds since 1970, of the last time it was seen
    count: int = 1


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One node as its probe saw it last; names are empty outside of Kubernetes."""

    ray_node: str  # Ray's id
    address: str
    head: bool
    pod: str = ""
    node: str = ""  # Kubernetes node, e.g. hyperpod-i-0123456789abcdef0
    time: float = 0.0
    alive: bool = True
    measured: dict[str, float] = {}  # name with unit -> value: {"shm_free_bytes": …, "gpu0_temperature_celsius": …}
    findings: list[Finding] = []


def write_node_reports(run: RunFolder, attempt: int, reports: Sequence[NodeReport]) -> None:
    """Replace the reports of this attempt. Raises StorageError."""
    replace_file(run.node_reports(attempt), msgspec.json.encode(list(reports)) + b"\n")


def read_node_reports(run: RunFolder, attempt: int) -> list[NodeReport]:
    """Empty before the first ones, and where the file is damaged: the next ones will not be."""
    try:
        return msgspec.json.decode(read_file(run.node_reports(attempt)), type=list[NodeReport])
    except (FileNotFoundError, msgspec.DecodeError):
        return []
