"""Finds the answer in a reply."""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL | re.IGNORECASE)


def marked_answer(reply: str, pattern: str | None = None, boxed: bool = False) -> str | None:
    """What a reply marks as its answer: the last match of `pattern` (its first group), or of <answer>…</answer>.

    `boxed` also takes the last `\\boxed{…}` where there is no tag. None where nothing is marked.
    """
    if pattern is not None:
        matches = list(re.finditer(pattern, reply, re.DOTALL))
        if not matches:
            return None
        found = matches[-1]
        return (found.group(1 if found.re.groups else 0) or "").strip()
    tagged = _TAGGED.findall(reply)
    if tagged:
        return str(tagged[-1])
    return last_boxed(reply) if boxed else None


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{…}, whose braces may be nested; None where there is none."""
    start = len(text)
    while (start := text.rfind("\\boxed{", 0, start)) >= 0:
        begin = start + len("\\boxed{")
        depth = 1
        for index in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[begin:index].strip()
    return None
