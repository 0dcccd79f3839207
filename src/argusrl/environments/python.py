"""The user's own Environment class: made with `environment.options`, its answers checked before they travel."""

from __future__ import annotations

import math
from typing import Any

from argusrl.config.objects import load_object
from argusrl.config.sections import EnvironmentSection
from argusrl.environments.base import Environment, StepResult
from argusrl.errors import ConfigError
from argusrl.types import Image, Message, Prompt


class PythonEnvironment:
    """An Environment around the user's. Raises what it raises, and TypeError or ValueError for malformed answers."""

    def __init__(self, section: EnvironmentSection) -> None:
        if section.factory is None:
            raise ConfigError("environment: kind python needs `factory`, e.g. maze.py:Maze")
        self._environment: Environment = load_object(section.factory)(**section.options)

    def reset(self, prompt: Prompt, seed: int) -> tuple[Message, ...]:
        return _checked_messages("reset", self._environment.reset(prompt, seed))

    def step(self, reply: str) -> StepResult:
        result = self._environment.step(reply)
        if not isinstance(result, StepResult):
            raise TypeError(f"step must return a StepResult, got {type(result).__name__}")
        if not math.isfinite(result.reward):
            raise ValueError(f"step returned the reward {result.reward}")
        over = result.terminated or result.truncated
        messages = _checked_messages("step", result.messages, may_be_empty=over)
        return StepResult(
            messages=() if over else messages,
            reward=float(result.reward),
            terminated=bool(result.terminated),
            truncated=bool(result.truncated and not result.terminated),
            action=result.action,
            info=result.info,
        )

    def close(self) -> None:
        self._environment.close()


def _checked_messages(verb: str, messages: Any, may_be_empty: bool = False) -> tuple[Message, ...]:
    if not isinstance(messages, (tuple, list)) or not all(isinstance(message, Message) for message in messages):
        raise TypeError(f"{verb} must return a tuple of Message, got {messages!r:.200}")
    if not messages and not may_be_empty:
        raise ValueError(f"{verb} returned no message, but the episode is not over")
    for message in messages:
        for part in message.content:
            if not isinstance(part, (str, Image)):
                raise TypeError(f"{verb}: a message holds {type(part).__name__}; only str and Image may be in it")
    return tuple(messages)
