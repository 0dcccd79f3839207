"""All rewards of a recipe, scored side by side and added up with their weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from argusrl.cluster.pool import ProcessPool
from argusrl.config.sections import RewardSection
from argusrl.errors import ConfigError
from argusrl.rewards.base import Reward, RewardFailed, Scorable
from argusrl.rewards.http import HttpReward
from argusrl.rewards.pooled import EnvironmentReward, FunctionReward, finite


class PreparedReward(Reward, Protocol):
    """A Reward that can be checked before the first trajectory."""

    async def prepare(self) -> None:
        """Import and look up what it needs. Raises ConfigError."""
        ...


def open_rewards(sections: Sequence[RewardSection], processes: int = 1) -> RewardSet:
    """The rewards of a recipe; `processes` compute functions. Starts nothing yet; use it from one event loop.

    Raises ConfigError where two rewards have the same name.
    """
    names = Counter(section.name or section.kind for section in sections)
    doubled = [f"rewards: {count} rewards are called '{name}'" for name, count in names.items() if count > 1]
    if doubled:
        raise ConfigError(doubled, "give each a name of its own")
    pool = ProcessPool(processes)
    return RewardSet([_opened(section, pool) for section in sections], pool)


def _opened(section: RewardSection, pool: ProcessPool) -> PreparedReward:
    if section.kind == "environment":
        return EnvironmentReward(section)
    if section.kind == "http":
        return HttpReward(section)
    return FunctionReward(section, pool)


class RewardSet:
    """Scores trajectories by every reward."""

    def __init__(self, rewards: Sequence[PreparedReward], pool: ProcessPool) -> None:
        self.rewards = tuple(rewards)
        self._pool = pool

    async def prepare(self) -> None:
        """Import user functions and look tokens up. Raises ConfigError with the problems of all rewards."""
        results = await asyncio.gather(*(reward.prepare() for reward in self.rewards), return_exceptions=True)
        problems: list[str] = []
        hints: list[str] = []
        for result in results:
            if isinstance(result, ConfigError):
                problems += result.problems
                hints += [result.hint] if result.hint and result.hint not in hints else []
            elif isinstance(result, BaseException):
                raise result
        if problems:
            raise ConfigError(problems, "; ".join(hints))

    async def score(self, item: Scorable) -> tuple[float, dict[str, float]]:
        """(weighted sum, unweighted score by name).

        Raises RewardFailed of the reward that failed; of several, one that is not infrastructure, since trying
        again does not help then.
        """
        results = await asyncio.gather(*(reward.score(item) for reward in self.rewards), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise min(failures, key=lambda failure: isinstance(failure, RewardFailed) and failure.infrastructure)
        scores = {reward.name: float(result) for reward, result in zip(self.rewards, results, strict=True)}  # type: ignore[arg-type]
        total = sum(reward.weight * scores[reward.name] for reward in self.rewards)
        return finite("the weighted sum of rewards", total), scores

    async def close(self) -> None:
        """End processes and connections; scores under way fail as infrastructure."""
        for reward in self.rewards:
            await reward.close()
        await self._pool.close()
