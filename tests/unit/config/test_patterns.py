from __future__ import annotations

import pytest

from argusrl.config.patterns import fitted_text


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"<action>\s*(.*?)\s*</action>", "<action>\0</action>"),
        (r"The count is (\d+)\.", "The count is \0."),
        (r"^\s*\\boxed\{(.*)\}\s*$", "\\boxed{\0}"),
        (r"<think>.*</think>\s*<answer>.*</answer>", "<think>\0</think><answer>\0</answer>"),
        (r"(?i)(left|right)", "\0"),
        (r"left|right", None),
        (r"(?<=x{3})(\d{2,4})(?!z)", None),
        (r"[abc]{4}(.*)", None),
    ],
)
def test_texts_fit_or_are_not_given(pattern: str, text: str | None) -> None:
    assert fitted_text(pattern) == text
