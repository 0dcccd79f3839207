from __future__ import annotations

from pathlib import Path

import pytest

from argusrl.config.sections import EnvironmentSection
from argusrl.environments.python import PythonEnvironment
from argusrl.errors import ConfigError
from argusrl.types import Prompt

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_environment.py"
USER = Path(__file__).with_name("user_environments.py")


def made(factory: str, **options) -> PythonEnvironment:
    return PythonEnvironment(EnvironmentSection(kind="python", factory=factory, options=options, max_turns=9))


def test_the_example_is_won_by_bisection_and_repeats_by_seed() -> None:
    def win(seed: int) -> list[str | None]:
        env = made(f"{EXAMPLE}:GuessTheNumber", largest=100)
        assert "1 to 100" in env.reset(Prompt(id="a"), seed)[0].content[0]
        low, high, guesses = 1, 100, []
        while True:
            guess = (low + high) // 2
            result = env.step(f"I say {guess}")
            guesses.append(result.action)
            if result.terminated:
                assert result.reward == 1.0
                return guesses
            low, high = (guess + 1, high) if "Higher" in result.messages[0].content[0] else (low, guess - 1)

    assert win(1) == win(1)
    assert len({tuple(win(seed)) for seed in range(5)}) > 1


def test_a_reply_without_a_number_is_no_action() -> None:
    env = made(f"{EXAMPLE}:GuessTheNumber")
    env.reset(Prompt(id="a"), 0)
    result = env.step("hm")
    assert result.action is None
    assert not result.terminated


def test_options_reach_the_class_and_unknown_ones_raise() -> None:
    with pytest.raises(TypeError, match="largets"):
        made(f"{EXAMPLE}:GuessTheNumber", largets=3)
    with pytest.raises(ConfigError, match="factory"):
        PythonEnvironment(EnvironmentSection(kind="python"))


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        ("nonsense", TypeError, "must return a StepResult, got str"),
        ("nan", ValueError, "reward nan"),
        ("silent", ValueError, "no message"),
    ],
)
def test_malformed_answers_are_named(reply: str, error: type[Exception], words: str) -> None:
    env = made(f"{USER}:Scripted")
    env.reset(Prompt(id="a"), 0)
    with pytest.raises(error, match=words):
        env.step(reply)
