from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from argusrl.cluster.plan.prediction import Prediction
from argusrl.training import plan_event
from argusrl.training.peaks import engine_peak_bytes, process_peak_bytes, rank_peak_bytes

PREDICTION = Prediction(
    rank_bytes=1000, engine_bytes=2000, seconds={"time/train_seconds": 2.0, "time/rollout_seconds": 1}
)
METRICS = {"memory/rank_bytes": 1100, "memory/engine_bytes": 0, "time/train_seconds": 1.0, "time/rollout_seconds": 2.5}


def said(monkeypatch: pytest.MonkeyPatch, step: int, prediction: Prediction | None) -> list[tuple[str, str, Any]]:
    """Events after a step."""
    events: list[tuple[str, str, Any]] = []
    monkeypatch.setattr(plan_event, "predict", lambda _config: prediction)
    run: Any = SimpleNamespace(config=None, say=lambda kind, text, **fields: events.append((kind, text, fields)))
    asyncio.run(plan_event.say_plan(run, {"step": step, **METRICS}))
    return events


def test_step_three_is_compared_with_its_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    ((kind, text, fields),) = said(monkeypatch, 3, PREDICTION)
    assert kind == "plan"
    assert "memory/rank_bytes 1.10" in text
    assert fields["compared"]["time/train_seconds"] == {"predicted": 2.0, "measured": 1.0}
    assert "memory/engine_bytes" not in fields["compared"]  # was not measured


@pytest.mark.parametrize(("step", "prediction"), [(2, PREDICTION), (4, PREDICTION), (3, None)])
def test_nothing_is_said_at_other_times(
    step: int, prediction: Prediction | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(monkeypatch, step, prediction) == []


def test_a_process_knows_its_peak() -> None:
    before = process_peak_bytes()
    assert before > 1 << 20
    assert rank_peak_bytes() >= before
    block = bytearray(before + (64 << 20))
    assert engine_peak_bytes() > before + (32 << 20)
    assert block
