"""What a step's metrics say of the engines' work, from counters that only grow."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from argusrl.observe.metrics import checked_row
from argusrl.rollout.engine import EngineProgress
from argusrl.training.run import Run


class Engines:
    def __init__(self) -> None:
        self.counters: dict[Any, EngineProgress] = {}

    async def progress(self) -> dict[Any, EngineProgress]:
        return dict(self.counters)


def work_of(run: Any) -> dict[str, float]:
    return asyncio.run(Run.engine_work(run))


def test_counters_of_a_step_are_those_since_the_step_before_and_a_new_engine_begins_at_zero() -> None:
    engines = Engines()
    run = SimpleNamespace(workers=SimpleNamespace(engines=engines), engine_counters={})
    engines.counters = {
        "a": EngineProgress(prompt_tokens=1000, cached_prompt_tokens=900, computed_prompt_tokens=100),
        "b": EngineProgress(prompt_tokens=50, computed_prompt_tokens=50),
    }
    work_of(run)
    engines.counters = {
        "a": EngineProgress(
            prompt_tokens=1800,
            cached_prompt_tokens=1500,
            computed_prompt_tokens=300,
            needed_prompt_tokens=160,
            distinct_prompt_tokens=30,
            encoded_image_tokens=40,
            needed_image_tokens=20,
        ),
        "c": EngineProgress(prompt_tokens=200, computed_prompt_tokens=20, needed_prompt_tokens=40),
    }
    work = work_of(run)
    assert work == {
        "rollout/cached_prompt_share": 600 / 1000,
        "compute/redundancy_prefill": (200 + 20) / (160 + 40),
        "compute/redundancy_prefill_raw": (200 + 20) / 30,
        "compute/redundancy_encoder": 2.0,
    }
    assert checked_row({"step": 1, **work})


def test_engines_that_did_nothing_did_nothing_twice() -> None:
    run = SimpleNamespace(workers=SimpleNamespace(engines=Engines()), engine_counters={})
    assert work_of(run)["compute/redundancy_prefill"] == 1.0
    assert work_of(run)["rollout/cached_prompt_share"] == 0.0
