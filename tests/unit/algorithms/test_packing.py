import json
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from argusrl.algorithms.packing import Plan, RowCost, UpdatePlan, plan_step


@st.composite
def steps(draw: st.DrawFn) -> list[RowCost]:
    rows = []
    for group in range(draw(st.integers(0, 6))):
        signal, prompt, patches = draw(st.booleans()), draw(st.integers(1, 60)), draw(st.integers(0, 400))
        for sample in range(draw(st.integers(1, 5))):
            response = draw(st.integers(1, 40))
            rows.append(
                RowCost(
                    group=f"p{group}",
                    tokens=response + prompt,
                    response_tokens=response,
                    advantage=(-1.0) ** sample if signal else 0.0,
                    prompt_tokens=draw(st.sampled_from([0, prompt])) if not sample else rows[-1].prompt_tokens,
                    image_patches=patches + draw(st.integers(0, 9)),
                )
            )
    return rows


def tokens_in(batch: Sequence[int], rows: list[RowCost]) -> int:
    """Of a micro-batch, the prompt of each group once."""
    prompts = {rows[i].group: rows[i].prompt_tokens for i in batch}
    return sum(rows[i].tokens - rows[i].prompt_tokens for i in batch) + sum(prompts.values())


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
            assert all(len(batch) <= 1 or tokens_in(batch, rows) <= budget for batch in batches)
            firsts = [rows[batch[0]].group for batch in batches if batch]
            assert firsts == sorted(firsts)


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


@given(steps(), SHAPES)
def test_a_group_that_fits_is_in_one_micro_batch(rows: list[RowCost], shape: tuple[int, int, int]) -> None:
    _, updates, budget = shape
    for update in plan_step(rows, ranks=1, updates=updates, micro_batch_tokens=budget).updates:
        homes: dict[str, set[int]] = {}
        for number, batch in enumerate(update.ranks[0]):
            for row in batch:
                homes.setdefault(rows[row].group, set()).add(number)
        for group, batches in homes.items():
            members = [i for i, row in enumerate(rows) if row.group == group]
            assert len(batches) == 1 or tokens_in(members, rows) > budget


def row(group: str, tokens: int, prompt: int = 0, patches: int = 0, advantage: float = 1.0) -> RowCost:
    return RowCost(
        group=group,
        tokens=tokens,
        response_tokens=tokens - prompt,
        advantage=advantage,
        prompt_tokens=prompt,
        image_patches=patches,
    )


def test_a_shared_prompt_counts_once_for_the_budget() -> None:
    rows = [row(f"g{i // 8}", 120, prompt=100) for i in range(32)]
    (update,) = plan_step(rows, ranks=1, updates=1, micro_batch_tokens=520).updates
    assert [len(batch) for batch in update.ranks[0]] == [16, 16]  # 2 groups of 100 + 8 · 20


def test_cutting_a_group_has_to_pay() -> None:
    """Two ranks, three groups: long prompts make it dearer to compute a group on both; long replies do not."""
    for prompt, cut in ((1000, False), (10, True)):
        rows = [row(f"g{i // 8}", prompt + 20, prompt=prompt) for i in range(24)]
        (update,) = plan_step(rows, ranks=2, updates=1, micro_batch_tokens=10_000).updates
        homes = [{rows[i].group for batch in rank for i in batch} for rank in update.ranks]
        assert bool(homes[0] & homes[1]) == cut


def test_images_count_for_the_balance() -> None:
    rows = [row("image", 400, patches=2 * 6400), *(row(f"text{i}", 400) for i in range(3))]
    (update,) = plan_step(rows, ranks=2, updates=1, micro_batch_tokens=10_000).updates
    assert update.ranks == (((0,),), ((1, 2, 3),))


def test_groups_without_signal_are_computed_where_the_loss_has_more_to_say() -> None:
    rows = [row("a", 20), row("b", 20, advantage=0.0)]
    for idle in (True, False):
        (update,) = plan_step(rows, ranks=1, updates=1, micro_batch_tokens=100, idle_without_signal=idle).updates
        assert update.idle == ((1,) if idle else ())
        assert update.denominator_tokens == 40


def test_an_old_plan_still_reads() -> None:
    old = {"rows": 2, "updates": [{"denominator_tokens": 5, "idle": [1], "ranks": [[[0], []]]}]}
    assert Plan.from_json(old).updates[0].ranks == (((0,), ()),)
