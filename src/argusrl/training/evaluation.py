"""Evaluation on a fixed held-out set: greedy and sampled, with Wilson intervals. Nothing of it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from argusrl.config.sections import Config
from argusrl.rollout.player import PlaySettings
from argusrl.training.episode_worker import GroupOrder, Score
from argusrl.training.fleet import EpisodeFleet
from argusrl.training.rollout import together

_Z = 1.959964  # two-sided 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Share of episodes that reached evaluate.success_reward. Failed episodes count as tries, not as successes."""

    successes: int
    count: int
    failed: int
    mean_reward: float

    @property
    def accuracy(self) -> float:
        return self.successes / self.count if self.count else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval (Wilson 1927)."""
        n, p = self.count, self.accuracy
        if n == 0:
            return 0.0, 1.0
        middle = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
        half = _Z / (1 + _Z**2 / n) * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
        # exact at the ends, where rounding would leave 2.8e-17
        return (middle - half if p > 0 else 0.0), (middle + half if p < 1 else 1.0)

    def report(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "accuracy": self.accuracy,
            "low": low,
            "high": high,
            "successes": self.successes,
            "count": self.count,
            "failed": self.failed,
            "mean_reward": self.mean_reward,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Greedy and sampled accuracy of one adapter version."""

    greedy: Accuracy
    sampled: Accuracy

    def report(self) -> dict[str, Any]:
        return {"greedy": self.greedy.report(), "sampled": self.sampled.report()}

    def metrics(self) -> dict[str, float]:
        values = {}
        for name, accuracy in (("greedy", self.greedy), ("sampled", self.sampled)):
            low, high = accuracy.interval
            values[f"evaluate/{name}/accuracy"] = accuracy.accuracy
            values[f"evaluate/{name}/low"], values[f"evaluate/{name}/high"] = low, high
        return values


async def evaluate(
    episodes: EpisodeFleet,
    settings: PlaySettings,
    config: Config,
    *,
    prompts: int,
    engines: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Play every held-out prompt once greedily and `evaluate.samples` times at `evaluate.temperature`."""
    section = config.evaluate
    greedy = replace(settings, temperature=0.0)
    sampled = replace(settings, temperature=section.temperature)
    scores: dict[str, list[Score]] = {"greedy": [], "sampled": []}
    done = 0

    async def one(index: int, name: str) -> None:
        nonlocal done
        numbers = (0,) if name == "greedy" else tuple(range(section.samples))
        order = GroupOrder(index=index, samples=numbers, engine=index % engines)
        scores[name].extend(await episodes.evaluate(order, greedy if name == "greedy" else sampled))
        done += 1
        if on_progress is not None:
            on_progress(done, 2 * prompts)

    await together(one(index, name) for index in range(prompts) for name in scores)
    return EvaluationResult(
        greedy=_accuracy(scores["greedy"], section.success_reward),
        sampled=_accuracy(scores["sampled"], section.success_reward),
    )


def _accuracy(scores: Sequence[Score], success_reward: float) -> Accuracy:
    rewards = [score.reward for score in scores if not score.failed]
    return Accuracy(
        successes=sum(reward >= success_reward for reward in rewards),
        count=len(scores),
        failed=len(scores) - len(rewards),
        mean_reward=math.fsum(rewards) / len(rewards) if rewards else 0.0,
    )
