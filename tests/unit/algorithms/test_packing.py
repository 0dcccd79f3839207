import json

from hypothesis import given
from hypothesis import strategies as st

from argusrl.algorithms.packing import Plan, RowCost, UpdatePlan, plan_step


@st.composite
def steps(draw: st.DrawFn) -> list[RowCost]:
    rows = []
    for group in range(draw(st.integers(0, 6))):
        signal = draw(st.booleans())
        for sample in range(draw(st.integers(1, 5))):
            response = draw(st.integers(1, 40))
            rows.append(
                RowCost(
                    group=f"p{group}",
                    tokens=response + draw(st.integers(1, 60)),
                    response_tokens=response,
                    advantage=(-1.0) ** sample if signal else 0.0,
                )
            )
    return rows


def computed(update: UpdatePlan) -> list[int]:
    return sorted(row for rank in update.ranks for batch in rank for row in batch)


SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 200))


def rows_of(plan: Plan) -> list[int]:
    return [
        row
        for update in plan.updates
        for row in [*update.idle, *(row for rank in update.ranks for batch in rank for row in batch)]
    ]


@given(steps(), SHAPES)
def test_every_row_is_planned_exactly_once(rows: list[RowCost], shape: tuple[int, int, int]) -> None:
    ranks, updates, budget = shape
    plan = plan_step(rows, ranks=ranks, updates=updates, micro_batch_tokens=budget)
    assert sorted(rows_of(plan)) == list(range(len(rows)))
    assert plan.rows == len(rows)
    assert len(plan.updates) == updates


@given(steps(), SHAPES, SHAPES)
def test_denominators_and_membership_ignore_ranks_and_micro_batches(rows, one, other) -> None:
    updates = one[1]
    plans = [plan_step(rows, ranks=s[0], updates=updates, micro_batch_tokens=s[2]) for s in (one, other)]
    for first, second in zip(plans[0].updates, plans[1].updates, strict=True):
        assert first.denominator_tokens == second.denominator_tokens
        assert first.idle == second.idle
        assert computed(first) == computed(second)


@given(steps(), SHAPES)
def test_ranks_step_together_and_within_budget(rows: list[RowCost], shape: tuple[int, int, int]) -> None:
    ranks, updates, budget = shape
    for update in plan_step(rows, ranks=ranks, updates=updates, micro_batch_tokens=budget).updates:
        assert len(update.ranks) == ranks
        assert len({len(batches) for batches in update.ranks}) == 1
        for batches in update.ranks:
            order = [row for batch in batches for row in batch]
            assert order == sorted(order)
            assert all(len(b) <= 1 or sum(rows[i].tokens for i in b) <= budget for b in batches)


@given(steps(), SHAPES)
def test_groups_stay_whole_and_signal_is_spread(rows: list[RowCost], shape: tuple[int, int, int]) -> None:
    ranks, updates, budget = shape
    plan = plan_step(rows, ranks=ranks, updates=updates, micro_batch_tokens=budget)
    where: dict[str, set[int]] = {}
    counts = [set() for _ in range(updates)]
    for number, update in enumerate(plan.updates):
        for rank in update.ranks:
            for row in (row for batch in rank for row in batch):
                where.setdefault(rows[row].group, set()).add(number)
                counts[number].add(rows[row].group)
        assert all(rows[row].advantage == 0.0 for row in update.idle)
    assert all(len(numbers) == 1 for numbers in where.values())
    sizes = [len(groups) for groups in counts]
    assert max(sizes) - min(sizes) <= 1


@given(steps(), SHAPES)
def test_json_round_trip(rows: list[RowCost], shape: tuple[int, int, int]) -> None:
    plan = plan_step(rows, ranks=shape[0], updates=shape[1], micro_batch_tokens=shape[2])
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_balances_tokens_not_rows() -> None:
    lengths = [90, 30, 30, 30, 10, 10]
    rows = [RowCost(group="a", tokens=n, response_tokens=1, advantage=1.0) for n in lengths]
    (update,) = plan_step(rows, ranks=2, updates=1, micro_batch_tokens=1000).updates
    assert [sum(lengths[i] for b in rank for i in b) for rank in update.ranks] == [100, 100]


def test_a_group_stays_on_one_rank_where_there_are_enough() -> None:
    rows = [RowCost(group=f"g{i // 4}", tokens=10 + i // 4, response_tokens=1, advantage=1.0) for i in range(64)]
    (update,) = plan_step(rows, ranks=2, updates=1, micro_batch_tokens=100).updates
    homes = [{rows[i].group for batch in rank for i in batch} for rank in update.ranks]
    assert not homes[0] & homes[1]
    loads = [sum(rows[i].tokens for batch in rank for i in batch) for rank in update.ranks]
    assert max(loads) - min(loads) <= 4 * 26
