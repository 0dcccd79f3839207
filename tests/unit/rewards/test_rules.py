from __future__ import annotations

import pytest

from argusrl.rewards.rules import choice, exact, format_share, number


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("Red  Circle", "red circle", 1.0),
        ("<answer>red</answer>", "red", 1.0),
        ("it is red", "red", 0.0),
        ("4", 4, 1.0),
        ("b", ["a", "b"], 1.0),
        ("", "red", 0.0),
    ],
)
def test_exact(reply: str, answer: object, score: float) -> None:
    assert exact(reply, answer) == score


def test_exact_may_mind_case_and_needs_its_pattern() -> None:
    assert exact("Red", "red", case_sensitive=True) == 0.0
    assert exact("red", "red", pattern=r"colour: (\w+)") == 0.0
    assert exact("colour: red", "red", pattern=r"colour: (\w+)") == 1.0


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("B", "B", 1.0),
        ("<answer>(b)</answer>", "B", 1.0),
        ("B. a cat", "b", 1.0),
        ("The answer is B", "(B)", 1.0),
        ("A cat, so I say C", "C", 1.0),
        ("The answer is A because", "A", 1.0),
        ("A or B", "B", 0.0),
        ("A or B", "A", 0.0),
        ("(B) or (C)", "B", 0.0),
        ("a cat", "A", 0.0),
        ("", "A", 0.0),
    ],
)
def test_choice(reply: str, answer: str, score: float) -> None:
    assert choice(reply, answer) == score


@pytest.mark.parametrize(
    ("reply", "answer", "score"),
    [
        ("there are 3 dots, no, 4", 4, 1.0),
        ("<answer>1,000</answer>", "1000", 1.0),
        ("<answer>1e3</answer>", 1000, 1.0),
        ("1/2", 0.5, 1.0),
        ("-3", "−3", 1.0),
        ("x=5.", "5", 1.0),
        ("12 cm^2", 12, 1.0),
        ("<answer>3 or 4</answer>", 4, 0.0),
        ("<answer>40</answer>", 4, 0.0),
        ("1/0", 1, 0.0),
        ("1e999999999", 1, 0.0),
        ("none", 0, 0.0),
        ("", 0, 0.0),
    ],
)
def test_number(reply: str, answer: object, score: float) -> None:
    assert number(reply, answer) == score


def test_number_tolerances() -> None:
    assert number("3.14", 3.14159, tolerance=0.01) == 1.0
    assert number("3.14", 3.14159, tolerance=0.001) == 0.0
    assert number("101", 100, relative=0.01) == 1.0
    assert number("102", 100, relative=0.01) == 0.0


def test_format_is_the_share_of_whole_matches() -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    good, bad = "<think>a\nb</think>\n<answer>4</answer>\n", "well, <think></think><answer>4</answer>"
    assert format_share((good,), pattern) == 1.0
    assert format_share((good, bad), pattern) == 0.5
    assert format_share((), pattern) == 0.0
