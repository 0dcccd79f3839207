from __future__ import annotations

import pytest

from argusrl.config.sections import EvaluateSection
from argusrl.training.evaluation import Accuracy
from argusrl.training.evaluation_file import BestAdapter


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (5, 10, 0.2366, 0.7634),
        (10, 10, 0.7225, 1.0),
        (1, 1, 0.2065, 1.0),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson_interval(successes, count, low, high):
    accuracy = Accuracy(successes=successes, count=count, failed=0, mean_reward=0.0)
    assert accuracy.interval == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_nothing_tried_says_nothing():
    assert Accuracy(successes=0, count=0, failed=0, mean_reward=0.0).interval == (0.0, 1.0)


def seen(*accuracies: float) -> BestAdapter:
    best = BestAdapter()
    for number, accuracy in enumerate(accuracies):
        best.see(10 * number, {"sampled": {"accuracy": accuracy}})
    return best


def test_the_best_adapter_and_ties():
    assert seen(0.2, 0.9, 0.5).step == 10
    assert seen(0.2, 0.9, 0.9).step == 20  # of equals the later one


def test_stopping_early():
    section = EvaluateSection(stop_at=0.9, stop_after=2)
    assert seen(0.2, 0.5).stop_reason(section) == ""
    assert "stop_at" in seen(0.2, 0.95).stop_reason(section)
    assert "stop_after" in seen(0.8, 0.5, 0.8).stop_reason(section)
    assert seen(0.8, 0.5, 0.85).stop_reason(section) == ""
    assert seen(0.8, 0.5, 0.5).stop_reason(EvaluateSection()) == ""
