"""Rewards and an environment as a user might write them, with their faults."""

from __future__ import annotations

import time
import zlib
from typing import Any

from argusrl.environments.base import StepResult
from argusrl.types import Message, Prompt


def sometimes_nan(reply: str, prompt: str, answer: Any) -> float:
    """No number for about one reply in eight, the same ones each time."""
    if zlib.crc32(f"{prompt}{reply}".encode()) % 8 == 0:
        return float("nan")
    return float(str(answer) in reply)


class SlowTool:
    """One question; judging the answer takes long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.answer: Any = None

    def reset(self, prompt: Prompt, seed: int) -> tuple[Message, ...]:
        self.answer = prompt.answer
        return prompt.messages

    def step(self, reply: str) -> StepResult:
        time.sleep(self.seconds)
        reward = float(str(self.answer) in reply)
        return StepResult(messages=(), reward=reward, terminated=True, truncated=False, action=reply)

    def close(self) -> None:
        """Nothing is held."""
