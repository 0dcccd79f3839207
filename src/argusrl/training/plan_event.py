"""Prediction against measurement, once a run has settled: the event `plan`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from argusrl.cluster.plan.prediction import Prediction, predict
from argusrl.training.run import Run

STEP = 3  # the first ones load, compile and fill caches


async def say_plan(run: Run, metrics: Mapping[str, Any]) -> None:
    """After step 3: what was predicted for average trajectories, and what was measured."""
    if metrics["step"] != STEP:
        return
    prediction = await asyncio.to_thread(predict, run.config)
    if prediction is not None:
        pairs = compared(prediction, metrics)
        text = ", ".join(f"{name} {pair['measured'] / pair['predicted']:.2f}" for name, pair in pairs.items())
        run.say("plan", f"measured / predicted in step {STEP}: {text}", step=STEP, compared=pairs)


def compared(prediction: Prediction, metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """{metric: {predicted, measured}} of memory in bytes and phases in seconds, where both are known."""
    predicted = {
        "memory/rank_bytes": float(prediction.rank_bytes),
        "memory/engine_bytes": float(prediction.engine_bytes),
        **prediction.seconds,
    }
    return {
        name: {"predicted": round(value, 4), "measured": round(float(metrics[name]), 4)}
        for name, value in predicted.items()
        if value > 0 and metrics.get(name)
    }
