"""The clipped policy loss per token, and the sums a step reports. Pure functions on tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class ClipSettings:
    """Bounds of the probability ratio, and the cap of the importance weight (None: no weight)."""

    low: float = 0.2
    high: float = 0.2
    importance_cap: float | None = 2.0


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over tokens, to be divided by counts of the whole update. `loss` carries the gradient, the rest does not."""

    loss: Tensor  # []
    clipped: Tensor  # [] tokens whose gradient the clip removed
    ratio: Tensor  # [] sum of new / old probabilities
    clamped: Tensor  # [] tokens whose log-ratio left ±20
    cut: Tensor  # [] tokens whose importance weight was cut at the cap
    kl: Tensor  # [] sum of the estimates to the reference; 0 without one


def clipped_policy_loss(
    new: Tensor, old: Tensor, engine: Tensor, advantages: Tensor, settings: ClipSettings
) -> LossSums:
    """-w · min(r·A, clip(r, 1 - low, 1 + high)·A), summed over the given response tokens.

    r = exp(new - old) with the exponent clamped to ±20; w = min(exp(old - engine), cap) has no gradient and corrects
    for sampling by an engine that is not exactly the trainer.

    Args:
        new: [N] log-probabilities under the policy being trained, with gradient.
        old: [N] under the policy before the update (its own detached value on the first update).
        engine: [N] of the distribution the tokens were sampled from.
        advantages: [N], the trajectory's advantage at each of its tokens.
    """
    log_ratio = new - old
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    bounded = ratio.clamp(1.0 - settings.low, 1.0 + settings.high)
    losses = -torch.minimum(ratio * advantages, bounded * advantages)
    with torch.no_grad():
        too_high = (ratio > 1.0 + settings.high) & (advantages > 0)
        too_low = (ratio < 1.0 - settings.low) & (advantages < 0)
        weights, cut = _importance_weights(old - engine, settings.importance_cap)
    return LossSums(
        loss=(losses * weights).sum(),
        clipped=(too_high | too_low).sum(),
        ratio=ratio.detach().sum(),
        clamped=(log_ratio.detach().abs() > LOG_RATIO_LIMIT).sum(),
        cut=cut.sum(),
        kl=weights.new_zeros(()),
    )


def _importance_weights(gap: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """[N] truncated weights and [N] where they were cut."""
    if cap is None:
        return torch.ones_like(gap), torch.zeros_like(gap, dtype=torch.bool)
    weights = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return weights.clamp(max=cap), weights > cap
