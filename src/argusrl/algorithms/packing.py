"""Which row is computed where: groups -> updates, rows -> ranks, rows -> micro-batches. Pure and without torch.

The plan is stored in the commit, so that a step can be replayed. What an update divides by never depends on the
number of ranks or on the micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PARTS_PER_RANK = 4  # fewer would leave ranks waiting for the one with the longest groups


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """What planning needs to know of one trajectory."""

    group: str  # rows of the same prompt share it
    tokens: int  # prompt and response tokens of all turns, images expanded
    response_tokens: int
    advantage: float


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """One optimizer update. Numbers are positions in the list of rows that was planned."""

    denominator_tokens: int  # response tokens of every row of the update, computed or idle
    idle: tuple[int, ...]  # rows of groups without signal: nothing to compute
    ranks: tuple[tuple[tuple[int, ...], ...], ...]  # rank -> micro-batch -> rows; equally many micro-batches per rank


@dataclass(frozen=True, slots=True)
class Plan:
    """All updates of one step."""

    rows: int
    updates: tuple[UpdatePlan, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        updates = tuple(
            UpdatePlan(
                denominator_tokens=update["denominator_tokens"],
                idle=tuple(update["idle"]),
                ranks=tuple(tuple(tuple(rows) for rows in rank) for rank in update["ranks"]),
            )
            for update in value["updates"]
        )
        return cls(rows=value["rows"], updates=updates)


def plan_step(rows: Sequence[RowCost], *, ranks: int, updates: int, micro_batch_tokens: int) -> Plan:
    """Spread the rows of a step. The order of `rows` must not depend on timing; the plan is a function of it.

    Whole groups are dealt to the updates in turn, those with a non-zero advantage and those without apart, so that
    every update gets its share of signal. Groups of an update go to the rank with the least tokens, longest first;
    they stay together, because rows of one prompt share its computation, unless there are too few of them to balance
    the ranks. Within a rank rows go into micro-batches of at most `micro_batch_tokens` (a longer row is one of its
    own). Ranks with fewer micro-batches get empty ones, since collectives need all ranks.
    """
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group, []).append(index)
    with_signal = [members for members in groups.values() if any(rows[i].advantage != 0.0 for i in members)]
    without = [members for members in groups.values() if all(rows[i].advantage == 0.0 for i in members)]
    planned = []
    for update in range(updates):
        active = with_signal[update::updates]
        idle = sorted(index for members in without[update::updates] for index in members)
        planned.append(
            UpdatePlan(
                denominator_tokens=sum(rows[index].response_tokens for index in itertools.chain(idle, *active)),
                idle=tuple(idle),
                ranks=_spread(active, rows, ranks, micro_batch_tokens),
            )
        )
    return Plan(rows=len(rows), updates=tuple(planned))


def _spread(
    groups: Sequence[Sequence[int]], rows: Sequence[RowCost], ranks: int, micro_batch_tokens: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Groups -> rank -> micro-batch -> rows, padded with empty micro-batches to equal length."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    costs = [(sum(rows[index].tokens for index in part), part) for part in _parts(groups, ranks)]
    for tokens, part in sorted(costs, key=lambda cost: (-cost[0], cost[1][0])):
        rank = loads.index(min(loads))
        shares[rank] += part
        loads[rank] += tokens
    batches = [_cut(sorted(share), rows, micro_batch_tokens) for share in shares]
    longest = max(len(share) for share in batches)
    return tuple(tuple(share + [()] * (longest - len(share))) for share in batches)


def _parts(groups: Sequence[Sequence[int]], ranks: int) -> list[list[int]]:
    """What goes to a rank as one: whole groups, or equal slices of them where there are too few to balance."""
    if ranks == 1 or len(groups) >= PARTS_PER_RANK * ranks:
        return [list(members) for members in groups]
    slices = -(-PARTS_PER_RANK * ranks // max(1, len(groups)))
    parts = [list(members[number::slices]) for members in groups for number in range(slices)]
    return [part for part in parts if part]


def _cut(share: Sequence[int], rows: Sequence[RowCost], micro_batch_tokens: int) -> list[tuple[int, ...]]:
    """Consecutive rows until the budget is full."""
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    used = 0
    for index in share:
        if current and used + rows[index].tokens > micro_batch_tokens:
            batches.append(tuple(current))
            current, used = [], 0
        current.append(index)
        used += rows[index].tokens
    if current:
        batches.append(tuple(current))
    return batches
