"""The plan of a recipe on a machine: memory, storage and seconds of every phase, and what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from argusrl.cluster.instances import instance
from argusrl.cluster.plan.assumptions import Assumptions
from argusrl.cluster.plan.device import Setting, device_tables, setting_of
from argusrl.cluster.plan.host import head_growth, head_table, worker_table
from argusrl.cluster.plan.knobs import INSTANCE, changes_for
from argusrl.cluster.plan.limits import Limit, limits_of
from argusrl.cluster.plan.lines import Table
from argusrl.cluster.plan.machine import Machine, machine_of
from argusrl.cluster.plan.seconds import Fleets, StepSeconds, decode_seconds, fleets_of, step_seconds
from argusrl.cluster.plan.storage import StoragePlan, storage_plan
from argusrl.cluster.plan.workload import Workload, workload_of
from argusrl.config.load import with_overrides
from argusrl.config.model_shape import ModelShape
from argusrl.config.sections import Config
from argusrl.errors import ArgusError


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that makes the first failing limit hold. `then` is the next limit that fails; "" where none does."""

    changes: tuple[str, ...]  # key=value; the first may be --instance NAME
    then: str

    def to_json(self) -> dict[str, Any]:
        return {"changes": list(self.changes), "fits_then": not self.then, "next_limit": self.then}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything `argusrl plan` shows."""

    setting: Setting
    workload: Workload
    devices: Sequence[Table]  # one of GPUs that rank and engine share, or one of each kind
    worker: Table
    head: Table | None  # None: on the same machine
    storage: StoragePlan
    seconds: StepSeconds | None  # None: nothing is known of the GPU's speed
    fleets: Sequence[Fleets]
    limits: Sequence[Limit]
    typical: bool  # of average trajectories, not the fullest micro-batch

    @property
    def failing(self) -> Sequence[Limit]:
        return [limit for limit in self.limits if not limit.fits]

    @property
    def fits(self) -> bool | None:
        """None: nothing fails, and the memory of its GPUs, or all of the machine, is not known."""
        if self.failing:
            return False
        machine = self.setting.machine
        return None if not self.limits or (machine.device == "cuda" and machine.gpu_bytes is None) else True

    def to_json(self) -> dict[str, Any]:
        setting, found = self.setting, self.setting.estimate
        decoding = decode_seconds(setting, self.workload, setting.engines)[1] if setting.machine.gpu else {}
        return {
            "fits": self.fits,
            "machine": setting.machine.to_json(),
            "ranks": setting.ranks,
            "engines": setting.engines,
            "model": {
                "parameters": setting.shape.parameters,
                "trained_parameters": setting.trained_parameters,
                "element_bytes": setting.element_bytes,
                "merged": setting.merged,
            },
            "micro_batch": asdict(found.micro_batch),
            "cache_tokens": found.engine.cache_tokens,
            "workload": self.workload.to_json(),
            "tables": {table.title: table.to_json() for table in self.tables},
            "head_growth": [one.to_json() for one in head_growth(setting)],
            "storage": self.storage.to_json(),
            "seconds": self.seconds.to_json() if self.seconds else None,
            "decoding": {name: round(value, 5) for name, value in decoding.items()},
            "fleets": [one.to_json() for one in self.fleets],
            "limits": [one.to_json() for one in self.limits],
            "assumptions": setting.assumed.to_json(),
        }

    @property
    def tables(self) -> list[Table]:
        return [*self.devices, self.worker, *([self.head] if self.head is not None else [])]


def make_plan(
    config: Config,
    shape: ModelShape,
    machine: Machine,
    assumed: Assumptions | None = None,
    *,
    typical: bool = False,
    compare: bool = True,
) -> Plan:
    """Of a checked recipe, for the fullest micro-batch, or with `typical` for average trajectories.

    `compare` looks at other ways to use the GPUs, too.
    """
    assumed = assumed or Assumptions()
    workload = workload_of(config, shape, assumed)
    setting = setting_of(config, shape, machine, assumed, workload if typical else None)
    devices, worker, head = device_tables(setting), worker_table(setting, workload), head_table(setting, workload)
    storage = storage_plan(setting, workload)
    seconds = None
    if machine.gpu is not None:
        seconds = step_seconds(
            setting,
            workload,
            storage,
            ranks=setting.ranks,
            engines=setting.engines,
            colocated=config.cluster.colocate,
        )
    plan = Plan(
        setting=setting,
        workload=workload,
        devices=devices,
        worker=worker,
        head=head,
        storage=storage,
        seconds=seconds,
        fleets=(),
        limits=limits_of(setting, devices, worker, head, storage, seconds),
        typical=typical,
    )
    if not compare:
        return plan
    ways = [replace(way, fits=_fits(plan, way.changes)) for way in fleets_of(setting, workload, storage)]
    return replace(plan, fleets=ways)


def _fits(plan: Plan, changes: Sequence[str]) -> bool | None:
    changed = _changed(plan, changes)
    return None if changed is None else changed.fits


def fix_of(plan: Plan) -> Fix | None:
    """The mildest change that makes everything fit, or else the first limit; None where nothing fails or helps."""
    if not plan.failing:
        return None
    first, setting, partial = plan.failing[0], plan.setting, None
    for changes in changes_for(first, setting.config, setting.slots):
        changed = _changed(plan, changes)
        if changed is None:
            continue
        left = [limit for limit in changed.failing if limit.kind == first.kind]
        if not left and not changed.failing:
            return Fix(changes, "")
        if not left and partial is None:
            partial = Fix(changes, changed.failing[0].what)
    return partial


def _changed(plan: Plan, changes: Sequence[str]) -> Plan | None:
    """The plan of the changed recipe; None where the recipe or the machine does not allow the change."""
    setting = plan.setting
    config, machine = setting.config, setting.machine
    try:
        if changes[0].startswith(INSTANCE):
            if not machine.separate_head:
                return None
            kind = instance(changes[0].removeprefix(INSTANCE))
            config = with_overrides(config, changes[1:])
            machine = machine_of(config, instance_name=kind.name, nodes=-(-setting.slots // kind.gpus))
        else:
            config = with_overrides(config, changes)
            if machine.separate_head:  # pods and volume may have changed, GPUs have not
                found = machine_of(config, instance_name=machine.instance, nodes=machine.nodes)
                machine = replace(found, name=machine.name, gpu=machine.gpu, gpu_bytes=machine.gpu_bytes)
    except ArgusError:
        return None
    return make_plan(config, setting.shape, machine, setting.assumed, typical=plan.typical, compare=False)
