from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from argusrl.config.sections import RewardSection
from argusrl.rewards.check import check_rewards, reply_forms, wrong_answer
from argusrl.rewards.combined import open_rewards
from argusrl.types import Prompt

EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_reward.py"


def checked(sections: list[RewardSection], answer: object):
    async def run():
        rewards = open_rewards(sections)
        try:
            (result,) = await check_rewards(rewards, sections, [Prompt(id="p", answer=answer)])
        finally:
            await rewards.close()
        return result

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("section", "answer"),
    [
        ({"kind": "exact"}, "red circle"),
        ({"kind": "choice"}, "B"),
        ({"kind": "number"}, 1_000),
        ({"kind": "number", "pattern": r"The count is (\d+)\."}, 3),
        ({"kind": "number", "pattern": r"^\s*<count>\s*(-?\d+)\s*</count>\s*$"}, 3),
        ({"kind": "math"}, r"\frac{1}{2}"),
        ({"kind": "math", "pattern": r"\\boxed\{(.*)\}"}, "7"),
        ({"kind": "python", "function": f"{EXAMPLE}:brief_and_right"}, "blue"),
    ],
)
def test_rewards_that_tell_right_from_wrong_pass(section: dict, answer: object) -> None:
    result = checked([RewardSection(**section)], answer)
    assert result.problems == {}
    assert (result.gold, result.empty, result.wrong) == (1.0, 0.0, 0.0)


def test_a_reward_and_a_format_are_satisfied_by_one_reply() -> None:
    sections = [
        RewardSection(kind="number"),
        RewardSection(kind="format", pattern=r"<think>.*</think>\s*<answer>.*</answer>", weight=0.2),
    ]
    result = checked(sections, 4)
    assert result.problems == {}
    assert result.gold == pytest.approx(1.2)
    assert result.wrong == pytest.approx(0.2)


def test_a_reward_that_does_not_look_at_the_answer_is_found_out() -> None:
    result = checked([RewardSection(kind="format", pattern=r"<answer>.*</answer>")], 4)
    assert set(result.problems) == {"wrong"}
    assert "is wrong, but paid 1" in result.problems["wrong"]


def test_a_gold_answer_that_cannot_win_is_found_out() -> None:
    result = checked([RewardSection(kind="choice")], "a cat")
    assert "'choice' gives 0" in result.problems["gold"]


def test_rows_without_answer_and_failing_rewards_are_problems() -> None:
    assert checked([RewardSection(kind="exact")], None).problems == {"gold": "the row has no answer to try"}
    missing = RewardSection(kind="python", function=f"{EXAMPLE}:nothing_here")
    assert "nothing_here" in checked([missing], 1).problems["reward"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [(["A"], "B"), (["(b)"], "A"), (["9"], "10"), (["1,000"], "1001"), (["A", "B"], "C"), (["1", "2"], "3")],
)
def test_wrong_answers_look_alike(right: list[str], wrong: str) -> None:
    assert wrong_answer(right) == wrong


def test_forms_fitted_to_the_patterns_come_first() -> None:
    forms = list(reply_forms([RewardSection(kind="exact", pattern=r"Answer:\s*(\w+)")]))
    assert forms[0] == "Answer:\0"
    assert "<answer>\0</answer>" in forms
