from __future__ import annotations

from itertools import pairwise

from argusrl.observe.curve import braille, bucket, resample


def lit(lines: list[str]) -> list[tuple[int, int]]:
    """(column, row from the bottom) of every dot."""
    bits = {
        0x40: (0, 0),
        0x04: (0, 1),
        0x02: (0, 2),
        0x01: (0, 3),
        0x80: (1, 0),
        0x20: (1, 1),
        0x10: (1, 2),
        0x08: (1, 3),
    }
    found = []
    for line_number, line in enumerate(reversed(lines)):
        for position, character in enumerate(line):
            for bit, (column, row) in bits.items():
                if (ord(character) - 0x2800) & bit:
                    found.append((position * 2 + column, line_number * 4 + row))
    return found


def test_a_rise_goes_from_the_lower_left_to_the_upper_right() -> None:
    dots = lit(braille([0.0, 1.0], width=10, height=3, low=0.0, high=1.0))
    assert (0, 0) in dots
    assert (19, 11) in dots
    assert all(a[1] <= b[1] for a, b in pairwise(sorted(dots)))


def test_every_column_is_lit_and_jumps_are_connected() -> None:
    dots = lit(braille([0, 1, 0, 1, 0.5], width=8, height=4, low=0, high=1))
    assert {column for column, _ in dots} == set(range(16))


def test_values_outside_are_drawn_at_the_edge_and_nothing_is_blank() -> None:
    assert {row for _, row in lit(braille([5.0], 4, 2, 0.0, 1.0))} == {7}
    assert lit(braille([], 4, 2, 0.0, 1.0)) == []


def test_a_long_run_is_averaged_and_a_short_one_stretched() -> None:
    assert bucket([1, 3, 5, 7], 2) == [2, 6]
    assert resample([0.0, 1.0], 3) == [0.0, 0.5, 1.0]
