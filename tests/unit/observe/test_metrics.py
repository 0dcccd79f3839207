from __future__ import annotations

import math

import pytest

from argusrl.observe.metrics import METRICS, UndeclaredMetric, checked_row, metric, unhealthy


def test_names_that_readers_rely_on_are_declared() -> None:
    names = (
        "step reward/mean reward/std rollout/tokens_per_second rollout/trajectories rollout/failed_trajectories "
        "time/step_seconds time/rollout_seconds time/train_seconds time/sync_seconds policy/logprob_gap_max "
        "policy/grad_norm policy/loss adapter/version adapter/sha256"
    )
    assert set(names.split()) <= set(METRICS)


def test_every_metric_has_a_meaning() -> None:
    assert all(declared.meaning for declared in METRICS.values())


def test_rewards_are_declared_by_pattern() -> None:
    assert metric("reward/my-format/mean").name == "reward/<name>/mean"
    with pytest.raises(UndeclaredMetric):
        metric("reward/a/b/mean")


@pytest.mark.parametrize(
    "row",
    [
        {"step": 1, "reward/meen": 1.0},
        {"reward/mean": 1.0},
        {"step": 1, "adapter/sha256": 3},
        {"step": 1, "reward/mean": "high"},
    ],
)
def test_a_row_with_anything_undeclared_is_refused(row: dict[str, object]) -> None:
    with pytest.raises(UndeclaredMetric):
        checked_row(row)  # type: ignore[arg-type]


def test_a_row_begins_with_its_step_and_reads_the_words_for_not_finite() -> None:
    row = checked_row({"policy/loss": "NaN", "adapter/sha256": "ab", "policy/entropy": None, "step": 3})
    assert next(iter(row)) == "step"
    assert isinstance(row["policy/loss"], float)
    assert math.isnan(row["policy/loss"])
    assert row["adapter/sha256"] == "ab"


def test_values_outside_their_range_are_told() -> None:
    row = {
        "step": 1,
        "policy/entropy": 0.0,
        "rollout/truncated_share": 0.9,
        "policy/loss": math.inf,
        "reward/mean": 0.1,
    }
    lines = unhealthy(row)
    assert lines[0] == "policy/entropy is 0, healthy is at least 0.001"
    assert [line.partition(" ")[0] for line in lines] == ["policy/entropy", "rollout/truncated_share", "policy/loss"]
