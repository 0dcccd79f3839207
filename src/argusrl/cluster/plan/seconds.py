"""Seconds of the phases of a step, by roofline: what has to be computed, read and moved, at a share of the peaks.

Meant to compare layouts and to see which phase dominates; the shares are assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from argusrl.cluster.plan.device import Setting
from argusrl.cluster.plan.storage import StoragePlan
from argusrl.cluster.plan.workload import Workload

_HOUR = 3600.0
_FORWARD, _BACKWARD = 2, 2  # FLOPs per matrix element and token; the base is frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Of one step; phases follow each other unless said otherwise."""

    prefill: float
    decode: float
    environment: float
    hand_over: float  # both ways; 0 where nothing moves
    train: float
    gather: float  # of it, hidden behind the computation: weights over the network
    publication: float
    commit: float
    checkpoint: float  # in the background; more than a step stalls the run

    @property
    def rollout(self) -> float:
        return self.prefill + self.decode + self.environment

    @property
    def step(self) -> float:
        """Rollout and training after each other."""
        return self.rollout + self.hand_over + self.train + self.publication + self.commit

    @property
    def step_ahead(self) -> float:
        """With rollout.staleness 1: the next rollout runs beside the training of this one."""
        return max(self.rollout, self.train) + self.publication + self.commit

    def to_json(self) -> dict[str, float]:
        return {
            **{name: round(value, 4) for name, value in asdict(self).items()},
            "rollout": round(self.rollout, 4),
            "step": round(self.step, 4),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleets:
    """A way to use the GPUs."""

    ranks: int
    engines: int
    colocated: bool
    staleness: int
    step_seconds: float
    gpu_hours: float  # for 1,000 steps
    changes: Sequence[str] = ()  # of the recipe
    fits: bool | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def decode_seconds(setting: Setting, workload: Workload, engines: int) -> tuple[float, Mapping[str, float]]:
    """Of the step's replies on so many engines, and what decides it."""
    gpu, assumed, config = setting.machine.gpu, setting.assumed, setting.config
    assert gpu is not None
    engine, shape = setting.estimate.engine, setting.shape
    parallel = config.engine.tensor_parallel
    context = workload.first_prompt_tokens + workload.own_tokens / 2
    room = max(1.0, engine.cache_tokens / max(1.0, context)) if engine.cache_tokens else float("inf")
    own = workload.trajectories / engines
    at_once = max(1.0, min(config.engine.max_sequences, own, room))
    steps = own * workload.turns * workload.response_tokens / at_once
    weights = (shape.layers * shape.layer_weights + shape.head_parameters) * setting.element_bytes / parallel
    cache = at_once * context * engine.cache_token_bytes
    reading = (weights + cache) / (gpu.bandwidth_bytes * assumed.decode_bandwidth_share)
    flops = at_once * _FORWARD * (shape.layers * shape.layer_weights + shape.head_parameters) / parallel
    computing = flops / (gpu.flops * assumed.prefill_utilisation)
    one = max(reading, computing) + assumed.decode_overhead_seconds
    return steps * one, {"sequences_at_once": at_once, "decoding_steps": steps, "seconds_per_decoding_step": one}


def step_seconds(
    setting: Setting, workload: Workload, storage: StoragePlan, *, ranks: int, engines: int, colocated: bool
) -> StepSeconds:
    """On so many ranks and engines."""
    machine, assumed, shape = setting.machine, setting.assumed, setting.shape
    gpu = machine.gpu
    assert gpu is not None
    memory = setting.estimate
    decode, _ = decode_seconds(setting, workload, engines)
    forward = _FORWARD * shape.layers * shape.layer_weights
    prompts = forward * workload.prefill_tokens + _tower_flops(setting, workload)
    prefill = prompts / (engines * setting.config.engine.tensor_parallel * gpu.flops * assumed.prefill_utilisation)
    passes = _FORWARD + _BACKWARD + (_FORWARD if setting.checkpointing else 0)
    passes += _FORWARD if setting.config.algorithm.kl_weight else 0
    head = (_FORWARD + _BACKWARD) * shape.head_parameters * workload.sampled_tokens
    computed = passes * shape.layers * shape.layer_weights * workload.training_tokens + head
    computed += _tower_flops(setting, workload)
    gather = _gather_seconds(setting, workload, ranks)
    moved = 0.0
    if setting.moves and colocated:
        resident = memory.training.resident * setting.ranks / ranks
        moved = 2 * (memory.engine.weights + resident) / assumed.host_copy_bytes_per_second
    writing = storage.seconds(2 * storage.item("adapter").written)  # written, and read back
    loading = setting.published_bytes / assumed.host_copy_bytes_per_second
    if setting.merged:
        loading += memory.engine.host_pristine / assumed.host_copy_bytes_per_second
    checkpoint = storage.item("checkpoint")
    return StepSeconds(
        prefill=prefill,
        decode=decode,
        environment=(workload.turns - 1) * assumed.turn_seconds,
        hand_over=moved,
        train=max(gather, computed / (ranks * gpu.flops * assumed.training_utilisation)),
        gather=gather,
        publication=max(writing, loading + assumed.proof_seconds),
        commit=assumed.commit_seconds,
        checkpoint=storage.seconds(checkpoint.written * setting.config.checkpoint.every_steps),
    )


def fleets_of(setting: Setting, workload: Workload, storage: StoragePlan) -> list[Fleets]:
    """All GPUs for both in turn; and the best split into ranks and engines, in turn and one step ahead."""
    if setting.machine.gpu is None or not setting.cuda:
        return []
    slots = setting.slots

    def measured(ranks: int, engines: int, colocated: bool, staleness: int) -> Fleets:
        found = step_seconds(setting, workload, storage, ranks=ranks, engines=engines, colocated=colocated)
        seconds = found.step_ahead if staleness else found.step
        return Fleets(
            ranks=ranks,
            engines=engines,
            colocated=colocated,
            staleness=staleness,
            step_seconds=round(seconds, 3),
            gpu_hours=round(seconds * slots * 1000 / _HOUR, 1),
            changes=_layout(slots, engines, colocated, staleness),
        )

    ways = [measured(slots, slots, True, 0)]
    for staleness in (0, 1):
        splits: Sequence[Fleets] = [measured(slots - n, n, False, staleness) for n in range(1, slots)]
        if splits:
            ways.append(min(splits, key=lambda one: one.step_seconds))
    return ways


def _layout(slots: int, engines: int, colocated: bool, staleness: int) -> tuple[str, ...]:
    if colocated:
        return ("cluster.colocate=true", "cluster.engines=null", "rollout.staleness=0")
    return (
        "cluster.colocate=false",
        f"cluster.slots={slots}",
        f"cluster.engines={engines}",
        f"rollout.staleness={staleness}",
    )


def _tower_flops(setting: Setting, workload: Workload) -> float:
    """Of all different images of a step, once."""
    vision = setting.shape.vision
    return 0.0 if vision is None else _FORWARD * vision.depth * vision.block_parameters * workload.patches


def _gather_seconds(setting: Setting, workload: Workload, ranks: int) -> float:
    """FSDP gathers all layers in forward, backward and for what is computed again, in every micro-batch."""
    machine, assumed, shape = setting.machine, setting.assumed, setting.shape
    if ranks <= 1 or machine.nodes <= 1 or machine.network_bytes is None:
        return 0.0
    budget = max(setting.config.training.micro_batch_tokens, workload.trajectory_tokens)
    batches = -(-workload.training_tokens // (ranks * budget))
    times = 3 if setting.checkpointing else 2
    layers = shape.layers * shape.layer_parameters * setting.element_bytes
    return float(batches * times * layers / (machine.network_bytes * assumed.network_share))
