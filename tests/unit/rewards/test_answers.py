from __future__ import annotations

import pytest

from argusrl.rewards.answers import last_boxed, marked_answer


@pytest.mark.parametrize(
    ("reply", "pattern", "boxed", "found"),
    [
        ("no mark", None, False, None),
        ("<answer> 4 </answer>", None, False, "4"),
        ("<answer>1</answer> no, <ANSWER>2\n</ANSWER>", None, False, "2"),
        ("so \\boxed{\\frac{1}{2}} it is", None, False, None),
        ("so \\boxed{\\frac{1}{2}} it is", None, True, "\\frac{1}{2}"),
        ("\\boxed{1} <answer>2</answer>", None, True, "2"),
        ("A: 1, A: 2", r"A: (\d)", False, "2"),
        ("<answer>4</answer>", r"A: (\d)", False, None),
        ("go left", "left|right", False, "left"),
    ],
)
def test_marked_answer(reply: str, pattern: str | None, boxed: bool, found: str | None) -> None:
    assert marked_answer(reply, pattern, boxed) == found


def test_an_unfinished_box_is_passed_over() -> None:
    assert last_boxed(r"\boxed{1} and \boxed{2") == "1"
    assert last_boxed("nothing") is None
