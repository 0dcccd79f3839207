from __future__ import annotations

import pytest

from argusrl.rewards.mathematics import score


@pytest.mark.parametrize(
    ("reply", "answer", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("<answer>1/2</answer>", r"\frac12", 1.0),
        ("<answer>x^2+2x+1</answer>", "(x+1)^2", 1.0),
        ("<answer>(3,4)</answer>", "(3, 4)", 1.0),
        (r"<answer>2\sqrt{3}</answer>", r"$\sqrt{12}$", 1.0),
        ("the answer is 12 cm", "12", 1.0),
        ("<answer>7</answer>", ["6", "7"], 1.0),
        ("<answer>2</answer>", "1", 0.0),
        ("<answer></answer>", "1", 0.0),
        ("", "1", 0.0),
    ],
)
def test_equality_is_mathematical(reply: str, answer: object, expected: float) -> None:
    assert score(reply, answer) == expected


def test_a_pattern_that_is_not_there_is_wrong() -> None:
    assert score("<answer>1</answer>", "1", pattern=r"Answer: (.*)") == 0.0
    assert score("Answer: 1", "1", pattern=r"Answer: (.*)") == 1.0
