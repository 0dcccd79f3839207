"""Every metric, declared once: name, unit, meaning, healthy range. A row with an undeclared name is refused.

A row is a flat mapping with "step". `<name>` in a declared name stands for the name of a reward.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

MetricValue = float | int | str | None


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric. `low` and `high` bound what is healthy, both included; None is no bound."""

    name: str
    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None
    text: bool = False  # a string, not a number

    def healthy(self) -> str:
        """The healthy range in words; empty where any value is."""
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}"
        if self.low is not None:
            return f"at least {self.low:g}"
        return f"at most {self.high:g}" if self.high is not None else ""


_DECLARED = (
    Metric("step", "steps", "number of the step, from 1"),
    Metric("reward/mean", "reward", "mean weighted reward of the step's trajectories"),
    Metric("reward/std", "reward", "standard deviation of the weighted reward", low=1e-6),
    Metric("reward/<name>/mean", "reward", "mean of one reward before its weight"),
    Metric("rollout/tokens_per_second", "tokens/s", "sampled tokens of all engines per second of rollout"),
    Metric("rollout/trajectories", "trajectories", "trajectories that count in this step", low=1),
    Metric("rollout/failed_trajectories", "trajectories", "episodes that failed and count for nothing", high=0),
    Metric("rollout/adopted_trajectories", "trajectories", "of them, taken from an interrupted attempt's journal"),
    Metric("rollout/truncated_share", "share", "trajectories that a limit cut off", high=0.3),
    Metric("rollout/response_tokens_mean", "tokens", "sampled tokens per trajectory, all turns", low=1),
    Metric("rollout/prompt_tokens_mean", "tokens", "prompt tokens per trajectory, all turns, images expanded"),
    Metric("rollout/cached_prompt_share", "share", "prompt tokens that came from the engines' prefix cache"),
    Metric(
        "compute/redundancy_prefill", "", "prompt tokens that engines computed / the least with whole blocks", high=1.05
    ),
    Metric("compute/redundancy_prefill_raw", "", "the same if equal prompts of a group were computed once"),
    Metric("compute/redundancy_encoder", "", "image tokens that engines encoded / those of each image once", high=1.05),
    Metric("rollout/groups_without_signal", "groups", "groups whose trajectories all have the same reward"),
    Metric("time/step_seconds", "s", "wall time of the whole step"),
    Metric("time/rollout_seconds", "s", "wall time that the step waited for its rollout"),
    Metric("rollout/seal_seconds", "s", "of the rollout: wall time until the journal of the step was durable"),
    Metric("time/train_seconds", "s", "wall time of forward, backward and optimizer"),
    Metric("time/plan_seconds", "s", "wall time of advantages and plan, and until ranks have the memory"),
    Metric("time/sync_seconds", "s", "wall time from the end of training until the adapter is proven and durable"),
    Metric("time/gap_seconds", "s", "wall time since the step before that belongs to no phase"),
    Metric("time/commit_seconds", "s", "wall time until the commit was durable"),
    Metric("time/checkpoint_seconds", "s", "wall time training waited for the checkpoint of the step before"),
    Metric("time/evaluate_seconds", "s", "wall time of the evaluation after this step"),
    Metric(
        "policy/logprob_gap_max", "nat", "largest |log-probability of trainer - of engine| of a sampled token", high=0.1
    ),
    Metric("policy/logprob_gap_mean", "nat", "mean |log-probability of trainer - of engine|", high=0.02),
    Metric("policy/grad_norm", "", "norm of the gradient before it is cut", low=0, high=100),
    Metric("policy/loss", "", "policy loss"),
    Metric("policy/entropy", "nat", "mean negative log-probability of the sampled tokens", low=1e-3),
    Metric("policy/clip_share", "share", "tokens whose probability ratio was clipped", high=0.3),
    Metric("policy/learning_rate", "", "learning rate of the step's updates"),
    Metric("policy/importance_cut_share", "share", "tokens whose importance weight was cut", high=0.05),
    Metric("policy/trained_tokens", "tokens", "tokens of the rows trained on, each row's own, all updates"),
    Metric("policy/kl", "nat", "mean estimate (k3) of the divergence from the base model; 0 where kl_weight is", low=0),
    Metric(
        "compute/redundancy_training",
        "",
        "tokens through the training forward / different beginnings of sequences in each update",
        high=1.05,
    ),
    Metric("compute/redundancy_vision", "", "image patches through the tower / those of each image once", high=1.05),
    Metric("compute/rows_factor_training", "", "the same as redundancy_training if each row were computed alone"),
    Metric("compute/rows_factor_vision", "", "the same as redundancy_vision if each row were computed alone"),
    Metric("compute/padding_share", "share", "query places of attention in training that hold no token", high=0.3),
    Metric("policy/skipped_updates", "updates", "updates left out: no signal, or a gradient that is not finite"),
    Metric("adapter/version", "", "adapter version that the step published"),
    Metric("adapter/sha256", "", "its logical digest", text=True),
    Metric("adapter/handover_seconds", "s", "wall time from the end of training until every engine proved the adapter"),
    Metric("adapter/storage_reads", "reads", "how often engines read an adapter from storage instead of from memory"),
    Metric("adapter/canary_gap", "nat", "largest |log-probability of engine - of trainer| on the canary", high=0.1),
    Metric("adapter/proven_by_effect", "", "1 if the canary told the version from the one before, 0 if too close"),
    Metric("evaluate/greedy/accuracy", "share", "held-out prompts solved greedily"),
    Metric("evaluate/greedy/low", "share", "lower end of its 95 % interval"),
    Metric("evaluate/greedy/high", "share", "upper end of its 95 % interval"),
    Metric("evaluate/sampled/accuracy", "share", "held-out trajectories solved when sampled"),
    Metric("evaluate/sampled/low", "share", "lower end of its 95 % interval"),
    Metric("evaluate/sampled/high", "share", "upper end of its 95 % interval"),
    Metric("memory/driver_bytes", "bytes", "resident memory of the driver"),
    Metric(
        "memory/rank_bytes", "bytes", "largest peak of a rank: tensors on its GPU; on CPU its process without files"
    ),
    Metric("memory/engine_bytes", "bytes", "largest of an engine: taken of its GPU; on CPU its process without files"),
)

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _DECLARED}

_PATTERNS = [
    (re.compile(re.escape(metric.name).replace("<name>", "[^/]+")), metric)
    for metric in _DECLARED
    if "<" in metric.name
]


_NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # how JSON files of a run folder spell them


class UndeclaredMetric(ValueError):
    """A row holds a name that metrics.py does not declare, or a value of another kind than declared."""


def metric(name: str) -> Metric:
    """The declaration of `name`. Raises UndeclaredMetric."""
    if name in METRICS:
        return METRICS[name]
    for pattern, declared in _PATTERNS:
        if pattern.fullmatch(name):
            return declared
    raise UndeclaredMetric(f"metric '{name}' is not declared in observe/metrics.py")


def checked_row(row: Mapping[str, MetricValue]) -> dict[str, MetricValue]:
    """The row with its step first, values as plain int, float or str. Raises UndeclaredMetric."""
    if not isinstance(row.get("step"), int):
        raise UndeclaredMetric(f"a row needs a whole 'step', got {row.get('step')!r}")
    checked: dict[str, MetricValue] = {"step": row["step"]}
    for name, value in row.items():
        if isinstance(value, str) and value in _NOT_FINITE:
            value = float(value)
        is_text = isinstance(value, str)
        if metric(name).text != is_text and value is not None:
            raise UndeclaredMetric(f"metric '{name}' is a {'text' if metric(name).text else 'number'}, got {value!r}")
        checked[name] = value if is_text or value is None or isinstance(value, int) else float(value)
    return checked


def unhealthy(row: Mapping[str, MetricValue]) -> list[str]:
    """One line for each value outside its healthy range, e.g. 'policy/entropy is 0, healthy is at least 0.001'."""
    lines = []
    for name, value in row.items():
        declared = metric(name)
        if value is None or isinstance(value, str):
            continue
        low, high = declared.low, declared.high
        if not math.isfinite(value) or (low is not None and value < low) or (high is not None and value > high):
            lines.append(f"{name} is {value:g}, healthy is {declared.healthy() or 'a finite number'}")
    return lines
