"""Comparing a plan with a run: the arithmetic, and that the head's prediction keeps its bounds."""

from __future__ import annotations

import pytest

from fakes.benchmark import FOLDER, load_benchmark


@pytest.fixture(autouse=True)
def scripts_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def test_lines_are_compared_by_what_was_measured() -> None:
    bench = load_benchmark("plan_against_run")
    lines = bench.compared({"a": 110.0, "b": 5.0, "total": 100_000.0}, {"a": 100.0, "b": 10.0, "total": 100_000.0})
    assert lines["a"]["error"] == pytest.approx(0.1)
    assert bench.worst(lines) == 0.0  # a and b are less than a thousandth of the total
    heavy = bench.compared({"a": 900.0, "total": 2000.0}, {"a": 1000.0, "total": 2000.0})
    assert bench.worst(heavy) == pytest.approx(0.1)
    assert bench.compared({"a": 1.0}, {"a": 0.0})["a"]["error"] is None


def test_every_process_of_a_run_belongs_to_a_line_of_the_plan() -> None:
    bench = load_benchmark("plan_against_run")
    assert bench._part("RankWorker") == "rank"
    assert bench._part("raylet") == bench._part("gcs") == "ray"
    assert bench._part("pool process") == "episode worker"
    assert bench._part("something else") == "other"


def test_the_head_of_the_reference_job_is_predicted_within_its_bounds() -> None:
    head = load_benchmark("head_memory")
    found = head.predict(196)
    assert found["driver_bytes"] < head.DRIVER_BOUND
    assert found["head_pod_bytes"] < head.POD_BOUND
    assert sum(found["lines"].values()) >= found["head_pod_bytes"]
