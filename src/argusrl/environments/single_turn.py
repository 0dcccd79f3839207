"""The episode of a plain question: one reply, then it is over. What the reply is worth is for the rewards to say."""

from __future__ import annotations

from argusrl.environments.base import StepResult
from argusrl.types import Message, Prompt


class SingleTurnSession:
    """An EnvironmentSession that needs no process."""

    async def reset(self, prompt: Prompt, seed: int) -> tuple[Message, ...]:
        """The prompt's messages; nothing is random."""
        return prompt.messages

    async def step(self, reply: str) -> StepResult:
        """Terminated, reward 0."""
        return StepResult(messages=(), reward=0.0, terminated=True, truncated=False, action=reply)

    async def close(self) -> None:
        """Nothing is held."""
