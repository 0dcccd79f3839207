"""AdamW over the trained parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from argusrl.policy.settings import PolicySettings


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
