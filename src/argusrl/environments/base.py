"""The environment port. An Environment turns one Prompt into an episode; it is synchronous and single-threaded.

User code runs in pool processes (pool.py) with a deadline that kills; the episode player sees an EnvironmentSession.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from argusrl.types import Message, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What an environment answers to a reply."""

    messages: tuple[Message, ...]  # what the model sees next; empty when the episode is over
    reward: float
    terminated: bool  # the task is over
    truncated: bool  # a limit of the environment cut it
    action: str | None = None  # how the reply was understood, for replay; None if it was not
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    def reset(self, prompt: Prompt, seed: int) -> tuple[Message, ...]:
        """Start the episode of `prompt`; the first messages. The same seed gives the same episode."""
        ...

    def step(self, reply: str) -> StepResult:
        """Apply one reply of the model."""
        ...

    def close(self) -> None:
        """Free everything; may be called twice."""
        ...


class EnvironmentSession(Protocol):
    """One episode as the player sees it: the same verbs, asynchronous, with deadlines.

    Raises EnvironmentFailed; its `infrastructure` says whether a retry with the same seed makes sense.
    """

    async def reset(self, prompt: Prompt, seed: int) -> tuple[Message, ...]: ...

    async def step(self, reply: str) -> StepResult: ...

    async def close(self) -> None: ...


class EnvironmentFailed(Exception):
    """User code raised (infrastructure False) or its process died or ran past the deadline (True)."""

    def __init__(self, source: str, message: str, infrastructure: bool) -> None:
        super().__init__(source, message, infrastructure)
        self.source, self.message, self.infrastructure = source, message, infrastructure
