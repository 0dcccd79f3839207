"""Mathematical equality by math-verify. Runs in a pool process: parsing can hang, and only a kill ends that surely."""

from __future__ import annotations

import logging
from typing import Any

from argusrl.rewards.answers import marked_answer

# It says on every call that its own timeouts (SIGALRM) are off; here the pool's deadline is in their place.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def score(reply: str, answer: Any, pattern: str | None = None, float_rounding: int = 6) -> float:
    r"""1.0 if the answer equals the gold one mathematically: 0.5, 1/2 and \frac{1}{2} are the same.

    The answer is what `pattern` finds, else <answer>…</answer>, else \boxed{…}, else what math-verify finds in the
    reply. LaTeX and plain text are both read.
    """
    from math_verify import verify

    marked = marked_answer(reply, pattern, boxed=True)
    if marked is None and pattern is not None:
        return 0.0
    found = _parsed(reply, whole=False) if marked is None else _parsed(marked, whole=True)
    for gold in answer if isinstance(answer, (list, tuple)) else [answer]:
        if marked is not None and "".join(marked.split()) == "".join(str(gold).split()) != "":
            return 1.0
        expected = _parsed(str(gold), whole=True)
        if found and expected and verify(expected, found, float_rounding=float_rounding, timeout_seconds=None):
            return 1.0
    return 0.0


def _parsed(text: str, whole: bool) -> list[Any]:
    """Sympy expressions in a text; `whole` says that all of it is one answer."""
    from math_verify import parse

    if whole:
        inner = text.strip().strip("$").strip()
        parsed = parse(inner if "\\boxed" in inner else f"\\boxed{{{inner}}}", parsing_timeout=None)
        if any(not isinstance(item, str) for item in parsed):
            return list(parsed)
    return list(parse(text, parsing_timeout=None))
