"""An environment of one's own: a number is hidden, the model guesses and is told "higher" or "lower".

In a recipe:

    environment:
      kind: python
      factory: examples/custom_environment.py:GuessTheNumber
      options: {largest: 10}
      max_turns: 4
    rewards:
      - {kind: environment}

An environment is any class with reset, step and close. It runs in a process of its own that is killed when a call takes
longer than `environment.step_timeout_seconds`, so it may load native libraries, hang or crash without harm to the run.
Draw everything random from the seed: after a crash the episode is rebuilt from its seed and the replies so far.
"""

from __future__ import annotations

import random
import re

from argusrl.environments.base import StepResult
from argusrl.types import Message, Prompt


class GuessTheNumber:
    def __init__(self, largest: int = 10) -> None:
        self.largest = largest
        self.number = 0

    def reset(self, prompt: Prompt, seed: int) -> tuple[Message, ...]:
        self.number = random.Random(prompt.info.get("seed", seed)).randint(1, self.largest)
        return (Message(role="user", content=(f"Guess my number, 1 to {self.largest}. Answer with a number.",)),)

    def step(self, reply: str) -> StepResult:
        found = re.search(r"\d+", reply)
        if found is None:
            return self._say("That is no number.", action=None)
        guess = int(found.group())
        if guess == self.number:
            return StepResult(messages=(), reward=1.0, terminated=True, truncated=False, action=str(guess))
        return self._say("Higher." if guess < self.number else "Lower.", action=str(guess))

    def close(self) -> None:
        pass

    def _say(self, text: str, action: str | None) -> StepResult:
        message = Message(role="user", content=(text,))
        return StepResult(messages=(message,), reward=0.0, terminated=False, truncated=False, action=action)
