"""The divergence from a reference policy, estimated at the sampled tokens. Pure functions on tensors."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from argusrl.algorithms.losses import LOG_RATIO_LIMIT, LossSums


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """[N] exp(-x) - 1 + x with x = new - reference clamped to ±20; never negative, and 0 where both agree.

    Its gradient is the plain one, (1 - exp(-x)) · d new: none where x was clamped.
    """
    distance = (new - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (-distance).exp() - 1.0 + distance


def with_kl(parts: LossSums, new: Tensor, reference: Tensor, weight: float) -> LossSums:
    """The loss with `weight` times the summed estimates added: not weighted by importance, not clipped."""
    total = k3(new, reference).sum()
    return replace(parts, loss=parts.loss + weight * total, kl=total.detach())
