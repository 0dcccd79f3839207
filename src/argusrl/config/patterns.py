"""Regular expressions of a recipe, read the other way round: from a pattern to a text that it matches."""

from __future__ import annotations

import re

HOLE = "\0"  # stands where the answer or action goes


_PIECE = re.compile(
    r"(?P<hole>\((?!\?)(?:[^()\\]|\\.)*\)|\.[*+]\??)"  # a group, or anything of any length
    r"|(?P<empty>\(\?[a-zA-Z]+\)|\\[bAZ]|\\s[*+]\??|[\^$])"  # flags, anchors, optional blanks
    r"|\\(?P<literal>\W)"
)


def fitted_text(pattern: str) -> str | None:
    """A text with HOLE in place of the pattern's groups and wildcards, e.g. "<action>\\0</action>".

    None where that is not easily found: it is a guess, tried with a few answers and never wrong when it is given.
    """
    text = _PIECE.sub(lambda piece: HOLE if piece["hole"] else piece["literal"] or "", pattern)
    if HOLE not in text:
        return None
    fits = any(re.search(pattern, text.replace(HOLE, sample), re.DOTALL) for sample in ("1", "B", "left"))
    return text if fits else None
