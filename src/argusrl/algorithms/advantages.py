"""Group advantages from scalar rewards. Plain floats, so that the driver needs no torch for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

STD_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], kind: Literal["group_std", "group_mean"] = "group_std") -> list[float]:
    """[G] rewards of one group -> [G] advantages.

    group_std is (R - mean) / (std + 1e-6) with the unbiased standard deviation; group_mean is R - mean. A group of
    one and a group of equal rewards carry no signal: exact zeros. Example: [1, 0, 0, 0.5] -> [1.3056, -0.7833,
    -0.7833, 0.2611].
    """
    if len(rewards) < 2 or all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "group_mean":
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + STD_EPSILON) for value in centred]
