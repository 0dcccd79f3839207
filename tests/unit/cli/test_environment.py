from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argusrl.cli.main import run

ROOT = Path(__file__).parents[3]

TASKS = """
import os
import gymnasium
from argusrl.environments.base import StepResult
from argusrl.types import Message, Prompt

def question(index, split):
    message = Message(role="user", content=(f"What is {index} + 1?",))
    return Prompt(id=f"{split}-{index}", messages=(message,), answer=index + 1)

def unpredictable(reply):
    return float("nan")

class Unsteady:
    def reset(self, prompt, seed):
        return (Message(role="user", content=(f"process {os.getpid()}",)),)

    def step(self, reply):
        return StepResult(messages=(), reward=1.0, terminated=True, truncated=False, action=reply)

    def close(self):
        pass

class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)
    render_mode = "rgb_array"

    def reset(self, seed=None, options=None):
        return 7, {}  # not in its observation space

def broken(info):
    return Broken()
"""


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "tasks.py").write_text(TASKS)

    def checked(recipe: dict[str, Any], *words: str) -> tuple[int, dict[str, bool], str]:
        data = {"kind": "generated", "generator": "tasks.py:question", "train_size": 5, "heldout_size": 2}
        whole = {"model": {"path": "none"}, "data": data, "rewards": [{"kind": "number"}], **recipe}
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(whole))
        code = run(["environment", "check", str(path), "--json", "--prompts", "2", *words])
        text = capsys.readouterr().out
        report = json.loads(text)
        assert report["passed"] == (code == 0)
        return code, {finding["text"]: finding["passed"] for finding in report["findings"]}, text

    return checked


LAKE = {
    "data": {
        "kind": "generated",
        "generator": str(ROOT / "examples/frozen_lake.py:start"),
        "train_size": 36,
        "heldout_size": 12,
    },
    "environment": {
        "kind": "gymnasium",
        "factory": str(ROOT / "examples/frozen_lake.py:make"),
        "actions": {"left": 0, "down": 1, "right": 2, "up": 3},
        "image_size": 96,
        "max_turns": 6,
    },
    "rewards": [{"kind": "environment"}],
}


def test_questions_with_a_sound_reward_pass(check) -> None:
    code, findings, _ = check({}, "--split", "heldout")
    assert code == 0
    assert findings["heldout: 2 prompts, 2 tried"]
    assert findings["the gold answer is paid in full (2 of 2)"]


def test_a_reward_that_cannot_be_earned_fails(check) -> None:
    code, findings, text = check({}, "rewards.0.kind=choice")
    assert code == 1
    assert not findings["the gold answer is paid in full (0 of 2)"]
    assert "reward 'choice' gives 0" in text


def test_a_failing_reward_is_shown(check) -> None:
    code, findings, text = check({"rewards": [{"kind": "python", "function": "tasks.py:unpredictable"}]})
    assert code == 1
    assert not findings["rewards answer (0 of 2)"]
    assert "answered nan" in text
    code, findings, text = check({"rewards": [{"kind": "python", "function": "tasks.py:missing"}]})
    assert code == 1
    assert not findings["rewards can be used"]


def test_a_gymnasium_environment_passes(check) -> None:
    code, findings, _ = check(LAKE)
    assert code == 0
    assert findings["Gymnasium's own checker is content"]
    assert findings["the same seed and replies show the same (2 of 2)"]
    assert any(text.startswith("actions are understood") for text in findings)


def test_a_pattern_and_actions_that_do_not_agree_fail(check) -> None:
    code, _, text = check(LAKE, r"environment.action_pattern=go (\d+)")
    assert code == 1
    assert "do not agree" in text


def test_an_environment_that_depends_on_its_process_fails(check) -> None:
    environment = {"kind": "python", "factory": "tasks.py:Unsteady"}
    code, findings, text = check({"environment": environment, "rewards": [{"kind": "environment"}]})
    assert code == 1
    assert not findings["the same seed and replies show the same (0 of 2)"]
    assert "differs from the first" in text


def test_gymnasiums_checker_and_failing_episodes_are_reported(check) -> None:
    environment = {"kind": "gymnasium", "factory": "tasks.py:broken", "actions": {"a": 0}, "max_turns": 2}
    code, findings, _ = check({"environment": environment, "rewards": [{"kind": "environment"}]})
    assert code == 1
    assert not findings["Gymnasium's own checker is content"]
    assert not findings["episodes play to their end (0 of 2)"]


def test_a_wrong_split_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["environment", "check", str(tmp_path / "none.yaml"), "--split", "test"]) == 2
    assert "train or heldout" in capsys.readouterr().err
