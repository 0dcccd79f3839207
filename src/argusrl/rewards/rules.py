"""Rewards that follow a fixed rule: pure functions of a reply and the gold answer, 1.0 for right and 0.0 for wrong.

The answer in a reply is what `pattern` finds, else what stands in <answer>…</answer>, else the whole reply. A gold
answer that is a list means that any of its items is right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from argusrl.rewards.answers import marked_answer

_NUMBER = re.compile(
    r"(?<![\w.^])[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.?\d+)?(?:(?<=\d)[eE][-+]?\d+)?(?:\s*/\s*\d+)?(?<=\d)(?!\w*\d)"
)
_PARENTHESISED = re.compile(r"[(\[{]\s*([A-Za-z])\s*[)\]}]")
_LEADING = re.compile(r"\s*([A-Za-z])\s*(?:[).:]|$)")
_CAPITAL = re.compile(r"\b([A-Z])\b(?!')")
_WORD = re.compile(r"\b[AI]\s+(?!(?:or|and|is)\b)(?=[a-z])")  # "A cat", "I think": words, not choices


def exact(reply: str, answer: Any, pattern: str | None = None, case_sensitive: bool = False) -> float:
    """The answer is the gold text; blanks do not count, nor does case unless asked for."""
    found = _answer(reply, pattern)
    if found is None:
        return 0.0

    def plain(text: str) -> str:
        text = " ".join(text.split())
        return text if case_sensitive else text.casefold()

    return float(any(plain(found) == plain(str(gold)) for gold in _golds(answer)))


def choice(reply: str, answer: Any, pattern: str | None = None) -> float:
    """The answer names the gold letter: `B`, `(b)`, `B. a cat`, `The answer is B`."""
    found = _answer(reply, pattern)
    letter = None if found is None else _letter(found)
    return float(letter is not None and any(letter == _letter(str(gold)) for gold in _golds(answer)))


def number(reply: str, answer: Any, pattern: str | None = None, tolerance: float = 0.0, relative: float = 0.0) -> float:
    """The answer is the gold number: `1,000`, `1e3`, `0.5` and `1/2` are understood; the last number counts.

    A marked answer must hold one number only: "3 or 4" is a guess. `tolerance` is absolute, `relative` a share of gold.
    """
    marked = marked_answer(reply, pattern)
    if marked is None and pattern is not None:
        return 0.0
    found = _numbers(reply if marked is None else marked)
    if not found or (marked is not None and len(set(found)) > 1):
        return 0.0
    for gold in _golds(answer):
        golds = _numbers(str(gold))
        if golds:
            allowed = max(Fraction(tolerance), Fraction(relative) * abs(golds[-1]))
            if abs(found[-1] - golds[-1]) <= allowed:
                return 1.0
    return 0.0


def format_share(replies: Sequence[str], pattern: str) -> float:
    """The share of replies that match `pattern` from beginning to end, outer blanks aside."""
    if not replies:
        return 0.0
    return sum(re.fullmatch(pattern, reply.strip(), re.DOTALL) is not None for reply in replies) / len(replies)


def _answer(reply: str, pattern: str | None) -> str | None:
    marked = marked_answer(reply, pattern)
    return reply if marked is None and pattern is None else marked


def _golds(answer: Any) -> Sequence[Any]:
    return answer if isinstance(answer, (list, tuple)) else [answer]


def _letter(text: str) -> str | None:
    """The one letter a text chooses; None if it chooses none or several."""
    leading = _LEADING.match(text)
    if leading is not None:
        return leading.group(1).upper()
    for letters in (_PARENTHESISED.findall(text), _CAPITAL.findall(_WORD.sub("", text)), _CAPITAL.findall(text)):
        chosen = {letter.upper() for letter in letters}
        if chosen:
            return chosen.pop() if len(chosen) == 1 else None
    return None


def _numbers(text: str) -> list[Fraction]:
    found = []
    for match in _NUMBER.finditer(text):
        digits = re.sub(r"[\s,]", "", match.group()).replace("−", "-")
        value = _fraction(digits)
        if value is not None:
            found.append(value)
    return found


def _fraction(digits: str) -> Fraction | None:
    numerator, _, denominator = digits.partition("/")
    exponent = re.search(r"[eE]([-+]?\d+)$", numerator)
    if exponent is not None and abs(int(exponent.group(1))) > 400:  # beyond any float, and costly to hold exactly
        return None
    try:
        return Fraction(numerator) / (Fraction(denominator) if denominator else 1)
    except (ValueError, ZeroDivisionError):
        return None
