"""Curves for a terminal: braille dots, two columns and four rows of them in each character."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_BLANK = 0x2800
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # [column][row from the bottom] → bit


def resample(values: Sequence[float], count: int) -> list[float]:
    """`count` values at even distances along the polyline through `values` (at least one)."""
    if len(values) == 1 or count == 1:
        return [values[-1]] * count
    result = []
    for index in range(count):
        position = index * (len(values) - 1) / (count - 1)
        left = min(int(position), len(values) - 2)
        share = position - left
        result.append(values[left] * (1 - share) + values[left + 1] * share)
    return result


def bucket(values: Sequence[float], count: int) -> list[float]:
    """At most `count` means over equal stretches of `values`, so that a long run fits a narrow plot."""
    if len(values) <= count:
        return list(values)
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def braille(values: Sequence[float], width: int, height: int, low: float, high: float) -> list[str]:
    """`height` lines of `width` characters, top line first. Values outside [low, high] are drawn at the edge."""
    columns, rows = width * 2, height * 4
    canvas = [[0] * width for _ in range(height)]
    if values:
        span = (high - low) or 1.0
        levels = [
            min(rows - 1, max(0, round((value - low) / span * (rows - 1))))
            for value in resample(bucket(values, columns), columns)
        ]
        previous = levels[0]
        for column, level in enumerate(levels):
            # Fill the jump to the last column so that steep parts stay one line.
            start, end = sorted((level, previous + (level > previous) - (level < previous)))
            for row in range(start, end + 1):
                canvas[height - 1 - row // 4][column // 2] |= _DOTS[column % 2][row % 4]
            previous = level
    return ["".join(chr(_BLANK + bits) for bits in line) for line in canvas]
