"""What a plan must stay below, in the order in which a run would meet it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from argusrl.cluster.plan.device import Setting
from argusrl.cluster.plan.host import shared_memory_bytes
from argusrl.cluster.plan.lines import TRAINING, Table
from argusrl.cluster.plan.seconds import StepSeconds
from argusrl.cluster.plan.storage import StoragePlan, heartbeat_operations

_RANK_PHASES = ("hand-over", *TRAINING, "publication")
_ENGINE_PHASES = ("rollout", "loading", "checkpoint")
_BUNDLE_GPUS = 1  # what a rank, an engine, or both of them are placed in


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One of them. `kind` says which keys of a recipe move it (knobs.py)."""

    kind: str
    what: str
    needed: float
    available: float
    unit: str  # "bytes" | "tokens" | "s" | "operations/s" | "slots" | "GPUs"

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    def __str__(self) -> str:
        return f"{self.what} needs {self._amount(self.needed)}, there is {self._amount(self.available)}"

    def _amount(self, value: float) -> str:
        return f"{value / 2**30:,.2f} GiB" if self.unit == "bytes" else f"{value:,.0f} {self.unit}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}


def limits_of(
    setting: Setting,
    devices: Sequence[Table],
    worker: Table,
    head: Table | None,
    storage: StoragePlan,
    seconds: StepSeconds | None,
) -> list[Limit]:
    """All that are known for this machine."""
    return [
        *_slots(setting),
        *_engine(setting),
        *_device(devices),
        *_host(setting, worker, head),
        *_storage(setting, storage, seconds),
    ]


def _slots(setting: Setting) -> Iterator[Limit]:
    if setting.cuda and setting.machine.separate_head:
        yield Limit(
            kind="slots",
            what=f"slots on {setting.machine.name}",
            needed=setting.slots,
            available=setting.machine.slots,
            unit="slots",
        )
    if setting.cuda and setting.config.engine.tensor_parallel > 1:
        yield Limit(
            kind="engine GPUs",
            what="engine.tensor_parallel: an engine in its bundle",
            needed=setting.config.engine.tensor_parallel,
            available=_BUNDLE_GPUS,
            unit="GPUs",
        )


def _engine(setting: Setting) -> Iterator[Limit]:
    """vLLM takes its share whole: weights and what it computes with, the rest is cache."""
    memory, device = setting.estimate.engine, setting.estimate.device_bytes
    if device is not None and setting.config.engine.cache_bytes is None:
        share = setting.config.engine.gpu_memory_share
        yield Limit(
            kind="engine share",
            what=f"an engine's weights in its {share:.0%} of a GPU",
            needed=memory.weights + memory.adapter_slots + memory.work,
            available=int(device * share),
            unit="bytes",
        )
    if memory.cache or device is not None:
        yield Limit(
            kind="cache",
            what="KV cache for one sequence of model.max_tokens",
            needed=setting.config.model.max_tokens,
            available=memory.cache_tokens,
            unit="tokens",
        )


def _device(devices: Sequence[Table]) -> Iterator[Limit]:
    for table in devices:
        if table.capacity is None:
            continue
        for kind, phases in (("rollout", _ENGINE_PHASES), ("training", _RANK_PHASES)):
            phase, peak = table.peak(phases)
            yield Limit(
                kind=kind,
                what=f"{table.title} in {phase}",
                needed=peak,
                available=table.capacity,
                unit="bytes",
            )


def _host(setting: Setting, worker: Table, head: Table | None) -> Iterator[Limit]:
    machine = setting.machine
    if worker.capacity is not None:
        phase, peak = worker.peak()
        yield Limit(
            kind="worker", what=f"{worker.title} in {phase}", needed=peak, available=worker.capacity, unit="bytes"
        )
    if machine.shared_memory_bytes is not None:
        yield Limit(
            kind="shared memory",
            what="/dev/shm of a worker",
            needed=shared_memory_bytes(setting),
            available=machine.shared_memory_bytes,
            unit="bytes",
        )
    if head is not None and head.capacity is not None:
        yield Limit(kind="head", what=head.title, needed=head.peak()[1], available=head.capacity, unit="bytes")


def _storage(setting: Setting, storage: StoragePlan, seconds: StepSeconds | None) -> Iterator[Limit]:
    if storage.capacity is not None:
        yield Limit(
            kind="capacity",
            what="the run folder at the end of the run",
            needed=storage.kept,
            available=int(storage.capacity * (1 - setting.assumed.free_storage_share)),
            unit="bytes",
        )
    if seconds is None or not setting.machine.separate_head:
        return
    every = setting.config.checkpoint.every_steps
    yield Limit(
        kind="checkpoint",
        what=f"a checkpoint, written within {'a step' if every == 1 else f'{every} steps'}",
        needed=seconds.checkpoint,
        available=seconds.step * every,
        unit="s",
    )
    if storage.metadata_iops is not None:
        yield Limit(
            kind="metadata",
            what="operations on names",
            needed=storage.operations / seconds.step + heartbeat_operations(1.0),
            available=storage.metadata_iops,
            unit="operations/s",
        )
