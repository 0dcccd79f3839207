import pytest
from hypothesis import given
from hypothesis import strategies as st

from argusrl.data.order import PromptOrder

sizes = st.integers(1, 60)
seeds = st.integers(0, 2**32)


@given(size=sizes, seed=seeds, shuffle=st.booleans(), window=st.integers(1, 70))
def test_every_pass_visits_each_row_exactly_once(size, seed, shuffle, window):
    rows = PromptOrder(size, seed, shuffle, window=window).take(0, size * 4)
    for start in range(0, len(rows), size):
        assert sorted(rows[start : start + size]) == list(range(size))


@given(size=sizes, seed=seeds, position=st.integers(0, 500), count=st.integers(0, 100), window=st.integers(1, 70))
def test_position_alone_decides_whatever_was_asked_before(size, seed, position, count, window):
    fresh = PromptOrder(size, seed, window=window)
    used = PromptOrder(size, seed, window=window)
    whole = used.take(0, position + count)
    assert fresh.take(position, count) == whole[position:]
    assert used.take(position, count) == whole[position:]


@given(size=sizes, seed=seeds, data=st.data())
def test_no_prompt_twice_in_a_window_wherever_it_begins(size, seed, data):
    window = data.draw(st.integers(1, size))
    rows = PromptOrder(size, seed, window=window).take(0, size * 4)
    for start in range(len(rows) - window + 1):
        assert len(set(rows[start : start + window])) == window


def test_passes_and_seeds_differ():
    order = PromptOrder(200, 1)
    first, second = order.take(0, 200), order.take(200, 200)
    assert first != second
    assert first != PromptOrder(200, 2).take(0, 200)
    assert first != list(range(200))


def test_without_shuffle_rows_come_in_their_order():
    assert PromptOrder(3, 5, shuffle=False).take(2, 5) == [2, 0, 1, 2, 0]


def test_the_order_never_changes_between_versions():
    assert PromptOrder(8, 7, window=3).take(5, 8) == GOLDEN


def test_two_million_rows_far_into_the_run():
    order = PromptOrder(2_000_000, 0, window=32)
    rows = order.take(2_000_000 * 1_000_000 - 16, 32)
    assert len(set(rows)) == 32


@pytest.mark.parametrize(("size", "window"), [(0, 1), (-1, 1), (3, 0)])
def test_nonsense_is_refused(size, window):
    with pytest.raises(ValueError, match="at least"):
        PromptOrder(size, 0, window=window)


def test_negative_positions_are_refused():
    with pytest.raises(ValueError, match="at least 0"):
        PromptOrder(3, 0).take(-1, 2)


GOLDEN = [0, 5, 7, 6, 1, 7, 4, 3]
