"""The reward port. A Reward is a named score of a trajectory with a weight; combined.py adds them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorable:
    """What a reward gets to see. A Python reward names the ones it wants as parameters."""

    reply: str  # the last reply
    replies: tuple[str, ...]  # all replies, one per turn
    prompt: str  # text of the prompt's messages
    answer: Any
    info: Mapping[str, Any] = field(default_factory=dict)
    environment_reward: float = 0.0  # sum over the episode
    terminated: bool = True


class Reward(Protocol):
    name: str
    weight: float

    async def score(self, item: Scorable) -> float:
        """A finite number. Raises RewardFailed."""
        ...

    async def close(self) -> None: ...


class RewardFailed(Exception):
    """The reward raised, answered nonsense (NaN), ran past its deadline, or its service does not answer.

    `infrastructure` is True where trying again later makes sense (service down, process killed by others).
    """

    def __init__(self, source: str, message: str, infrastructure: bool) -> None:
        super().__init__(source, message, infrastructure)
        self.source, self.message, self.infrastructure = source, message, infrastructure
