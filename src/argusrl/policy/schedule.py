"""The learning rate, a pure function of (step, update), so that nothing of it needs saving. No torch here."""

from __future__ import annotations

import math

from argusrl.config.sections import OptimizerSection


def learning_rate(
    section: OptimizerSection, *, step: int, update: int = 0, updates_per_step: int = 1, num_steps: int
) -> float:
    """Rate of update `update` (from 0) of step `step` (from 1).

    It rises linearly over `warmup_steps`, then follows the schedule, which spans `schedule_steps` (default
    `num_steps`) in all and stays at its end afterwards.
    """
    done = step - 1 + update / updates_per_step
    each = 1 / updates_per_step
    if done < section.warmup_steps:
        return section.learning_rate * (done + each) / section.warmup_steps
    span = (section.schedule_steps or num_steps) - section.warmup_steps
    progress = min(1.0, (done - section.warmup_steps) / max(span - each, each))
    if section.schedule == "constant":
        shape = 1.0
    elif section.schedule == "linear":
        shape = 1.0 - progress
    else:
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.learning_rate * (section.final_share + (1.0 - section.final_share) * shape)
