from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from argusrl.config.load import load_config
from argusrl.config.sections import EvaluateSection
from argusrl.rollout.player import PlaySettings
from argusrl.training.episode_worker import Score
from argusrl.training.evaluation import Accuracy, evaluate
from argusrl.training.evaluation_file import BestAdapter

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
SETTINGS = PlaySettings(
    temperature=0.3,
    max_response_tokens=8,
    max_prompt_tokens=50,
    max_tokens=100,
    max_turns=1,
    adapter_version=3,
    adapter_sha256="abc",
    request_timeout_seconds=5.0,
    episode_timeout_seconds=5.0,
    retries=1,
)


class HeldOut:
    """Greedy replies to even prompts are right; of the sampled ones the first is, the second fails as an episode."""

    def __init__(self) -> None:
        self.asked = []

    async def evaluate(self, order, settings):
        self.asked.append((order.index, order.samples, order.engine, settings.temperature))
        await asyncio.sleep(0.001 * (order.index % 2))
        if settings.temperature == 0.0:
            return [Score(prompt_id=str(order.index), sample=0, reward=float(order.index % 2 == 0), text="")]
        failed = ["", "reward judge: 503", ""]
        rewards = [0.8, 0.0, 0.5]
        return [
            Score(prompt_id=str(order.index), sample=n, reward=rewards[n], text="", failed=failed[n])
            for n in order.samples
        ]


def test_every_prompt_is_played_greedily_and_sampled():
    episodes, progress = HeldOut(), []
    overrides = ["evaluate.samples=3", "evaluate.temperature=0.7", "evaluate.success_reward=0.8"]
    config = load_config(RECIPE, overrides).config
    result = asyncio.run(
        evaluate(episodes, SETTINGS, config, prompts=4, engines=2, on_progress=lambda *done: progress.append(done))
    )
    assert sorted(episodes.asked) == sorted(
        each for index in range(4) for each in ((index, (0,), index % 2, 0.0), (index, (0, 1, 2), index % 2, 0.7))
    )
    assert progress == [(done, 8) for done in range(1, 9)]
    assert result.greedy == Accuracy(successes=2, count=4, failed=0, mean_reward=0.5)
    # A failed episode is a try, not a success, and no reward of zero.
    assert result.sampled == Accuracy(successes=4, count=12, failed=4, mean_reward=pytest.approx(0.65))
    report, metrics = result.report(), result.metrics()
    assert (report["sampled"]["count"], report["greedy"]["successes"]) == (12, 2)
    assert metrics["evaluate/greedy/accuracy"] == 0.5
    assert metrics["evaluate/sampled/low"] < metrics["evaluate/sampled/accuracy"] < metrics["evaluate/sampled/high"]


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
    assert seen(0.2, 0.9, 0.9).since_best == 1  # but as good is not better


def test_stopping_early():
    section = EvaluateSection(stop_at=0.9, stop_after=2)
    assert seen(0.2, 0.5).stop_reason(section) == ""
    assert "stop_at" in seen(0.2, 0.95).stop_reason(section)
    assert "stop_at" in seen(0.2, 0.9).stop_reason(section)  # reached is enough
    assert seen(0.95, 0.5).stop_reason(section) == ""  # only the newest one counts for stop_at
    assert "stop_after" in seen(0.8, 0.5, 0.8).stop_reason(section)
    assert seen(0.8, 0.5, 0.85).stop_reason(section) == ""
    assert seen(0.8, 0.5, 0.5).stop_reason(EvaluateSection()) == ""
