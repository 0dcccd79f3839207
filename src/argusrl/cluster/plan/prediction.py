"""What a run is told of its plan: a refusal before anything starts, and what to compare with what is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from argusrl.cluster.plan.device import engine_lines, rank_lines
from argusrl.cluster.plan.knobs import INSTANCE
from argusrl.cluster.plan.limits import Limit
from argusrl.cluster.plan.lines import PHASES, Line
from argusrl.cluster.plan.machine import Machine, machine_of
from argusrl.cluster.plan.plan import Plan, fix_of, make_plan
from argusrl.config.model_shape import ModelShape
from argusrl.config.sections import Config
from argusrl.errors import ConfigError, ModelError

_REFUSED = frozenset({"slots", "engine share", "cache", "rollout", "training", "worker", "shared memory", "head"})

_HOST_MARGIN = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """For average trajectories. On CPU memory is that of a whole process; on a GPU what is said of each."""

    rank_bytes: int  # GPU: tensors of a rank
    engine_bytes: int  # GPU: all that is taken of it during rollout
    seconds: Mapping[str, float]  # by name of the metric; {} where the speed of the GPU is not known

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def require_fit(config: Config, machine: Machine | None = None) -> list[str]:
    """Refuse what cannot fit `machine`, by default that of the recipe, or this one; warnings of what may not.

    Raises ConfigError where even average trajectories do not fit, with the limit and the key that moves it.
    """
    plan = _typical_plan(config, machine)
    if plan is None:
        return []
    refused = [limit for limit in plan.failing if limit.kind in _REFUSED and limit.needed > _sure(limit)]
    if refused:
        fix = fix_of(plan)
        hint = f"try {' '.join(fix.changes)}; ".replace(f"{INSTANCE} ", "nodes of type ") if fix else ""
        raise ConfigError([f"does not fit: {limit}" for limit in refused], f"{hint}argusrl plan shows every line")
    setting = plan.setting
    fullest = make_plan(config, setting.shape, setting.machine, setting.assumed, compare=False)
    return [f"may not fit: {limit}; argusrl plan shows every line" for limit in fullest.failing]


def _sure(limit: Limit) -> float:
    """Beyond this it certainly does not fit: sizes of processes are as they were measured on another machine."""
    return limit.available * (_HOST_MARGIN if limit.kind in ("worker", "head") else 1.0)


def predict(config: Config) -> Prediction | None:
    """Of a recipe on its machine; None where the model's sizes are not known."""
    plan = _typical_plan(config)
    if plan is None:
        return None
    setting, assumed = plan.setting, plan.setting.assumed
    rank, engine = _peak(rank_lines(setting)), _peak(engine_lines(setting))
    if setting.cuda:
        table = plan.devices[-1]
        engine = table.total("rollout") - table.size("driver's reserve")
    else:
        rank = int(rank * (1 + assumed.kept_share) + assumed.rank_process_bytes)
        rank += plan.worker.size("rows and images of the step") // setting.ranks
        engine += (
            setting.estimate.engine.weights
            + int(assumed.engine_process_bytes)
            + plan.worker.size("processed images") // setting.engines
        )
    seconds: dict[str, float] = {}
    if plan.seconds is not None:
        found = plan.seconds
        seconds = {
            "time/rollout_seconds": found.rollout,
            "time/train_seconds": found.train,
            "time/sync_seconds": found.publication + found.hand_over / 2,
            "time/step_seconds": found.step_ahead if config.rollout.staleness else found.step,
        }
    return Prediction(rank_bytes=rank, engine_bytes=engine, seconds=seconds)


def _typical_plan(config: Config, machine: Machine | None = None) -> Plan | None:
    try:
        shape = ModelShape.find(config.model.path, config.model.revision)
        machine = machine or machine_of(config)
    except (ModelError, ConfigError):  # what is wrong with the model is found by the check of the input
        return None
    return make_plan(config, shape, machine, typical=True, compare=False)


def _peak(lines: Sequence[Line]) -> int:
    return max(sum(line.in_phase(phase) for line in lines) for phase in PHASES)
