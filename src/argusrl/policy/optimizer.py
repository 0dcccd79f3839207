"""AdamW over the trained parameters, and the norm of their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from argusrl.policy.settings import PolicySettings
from argusrl.policy.sharding import gather_full, local


def make_adamw(parameters: Iterable[nn.Parameter], settings: PolicySettings) -> torch.optim.AdamW:
    """AdamW whose moments exist from the start, so that a state before the first update is a state like any other."""
    optimizer = torch.optim.AdamW(
        parameters,
        lr=0.0,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        foreach=settings.device == "cuda",
        fused=False,
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer


def gradient_norm(parameters: Mapping[str, nn.Parameter]) -> float:
    """Global L2 norm, equal bit for bit on any number of ranks, since it scales every update; a collective.

    Squares are summed in float64 along a fixed tree: inside each row, which one rank holds, then over all rows.
    """
    rows = {name: _row_sums(p.grad) for name, p in parameters.items() if p.grad is not None}
    whole = [sums for _, sums in gather_full(rows)]
    return _tree_sum(torch.cat(whole)).sqrt().item() if whole else 0.0


def _row_sums(gradient: Tensor) -> Tensor:
    """[rows] sharded like the gradient: the sum of squares of each."""
    part = local(gradient)
    sums = _tree_sum(part.double().square().reshape(len(part), gradient.shape[1:].numel()))
    if not isinstance(gradient, DTensor):
        return sums
    return DTensor.from_local(
        sums, gradient.device_mesh, gradient.placements, run_check=False, shape=gradient.shape[:1], stride=(1,)
    )


def _tree_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension by halving: what `sum` does depends on shapes, threads and the device."""
    while (size := values.shape[-1]) > 1:
        half = size // 2
        paired = values[..., :half] + values[..., half : 2 * half]
        values = torch.cat([paired, values[..., 2 * half :]], dim=-1) if size % 2 else paired
    return values[..., 0]
