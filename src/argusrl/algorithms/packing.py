"""Which row is computed where: groups -> updates, rows -> ranks, rows -> micro-batches. Pure and without torch.

The plan is stored in the commit, so that a step can be replayed. What an update divides by never depends on the
number of ranks or on the micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

PATCHES_PER_TOKEN = 16
"""Image patches that cost as much as one token: the tower is small against the language model, and has no backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCost:
    """What planning needs to know of one trajectory."""

    group: str  # rows of the same prompt share it
    tokens: int  # prompt and response tokens of all turns, images expanded
    response_tokens: int
    advantage: float
    prompt_tokens: int = 0  # of tokens, those of the first prompt: rows of a group on one rank compute them once
    image_patches: int = 0  # of all turns


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


def plan_step(
    rows: Sequence[RowCost], *, ranks: int, updates: int, micro_batch_tokens: int, idle_without_signal: bool = True
) -> Plan:
    """Spread the rows of a step. The order of `rows` must not depend on timing; the plan is a function of it.

    Whole groups are dealt to the updates in turn, those with a non-zero advantage and those without apart, so that
    every update gets its share of signal; those without are not computed where they are `idle_without_signal`.

    Groups of an update go to the rank with the least cost, dearest first. They stay together, because rows of one
    prompt share its computation, unless cutting them makes the slowest rank faster. Within a rank groups go into
    micro-batches of at most `micro_batch_tokens`, each shared prompt counted once; a group is cut only where it is
    larger than that, a row never. Ranks with fewer micro-batches get empty ones, since collectives need all ranks.
    """
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group, []).append(index)
    with_signal = [members for members in groups.values() if any(rows[i].advantage != 0.0 for i in members)]
    without = [members for members in groups.values() if all(rows[i].advantage == 0.0 for i in members)]
    planned = []
    for update in range(updates):
        active, rest = with_signal[update::updates], without[update::updates]
        if not idle_without_signal:
            active, rest = active + rest, []
        idle = sorted(itertools.chain(*rest))
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
    slices = [1]
    while ranks > 1 and slices[-1] < max(map(len, groups), default=1):
        slices.append(2 * slices[-1])
    deals = [_deal([part for members in groups for part in _sliced(members, count)], rows, ranks) for count in slices]
    shares, _ = min(deals, key=lambda deal: deal[1])  # of equal ones the first, which cuts least
    batches = [_cut(sorted(share), rows, micro_batch_tokens) for share in shares]
    longest = max(len(share) for share in batches)
    return tuple(tuple(share + [()] * (longest - len(share))) for share in batches)


def _sliced(members: Sequence[int], slices: int) -> list[list[int]]:
    """Like pieces, e.g. [0, 1, 2, 3] -> [0, 2], [1, 3]."""
    return [list(members[number::slices]) for number in range(min(slices, len(members)))]


def _deal(parts: Sequence[list[int]], rows: Sequence[RowCost], ranks: int) -> tuple[list[list[list[int]]], int]:
    """(the parts of each rank, the largest cost of a rank): dearest part first, to the rank with the least so far."""
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for cost, part in sorted(((_cost(part, rows), part) for part in parts), key=lambda it: (-it[0], it[1][0])):
        rank = loads.index(min(loads))
        shares[rank].append(part)
        loads[rank] += cost
    return shares, max(loads)


def _tokens(part: Sequence[int], rows: Sequence[RowCost]) -> int:
    """Of rows of one group in one micro-batch, their prompt once."""
    prompt = max(rows[index].prompt_tokens for index in part)
    return prompt + sum(rows[index].tokens - rows[index].prompt_tokens for index in part)


def _cost(part: Sequence[int], rows: Sequence[RowCost]) -> int:
    """Of rows of one group on one rank, in patches: the fewest that a row shows are taken for those of its prompt."""
    patches = [rows[index].image_patches for index in part]
    return PATCHES_PER_TOKEN * _tokens(part, rows) + sum(patches) - (len(patches) - 1) * min(patches)


def _cut(share: Sequence[Sequence[int]], rows: Sequence[RowCost], micro_batch_tokens: int) -> list[tuple[int, ...]]:
    """Consecutive groups until the budget is full."""
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    used = 0
    for piece in itertools.chain(*(_pieces(part, rows, micro_batch_tokens) for part in share)):
        tokens = _tokens(piece, rows)
        if current and used + tokens > micro_batch_tokens:
            batches.append(tuple(current))
            current, used = [], 0
        current += piece
        used += tokens
    if current:
        batches.append(tuple(current))
    return batches


def _pieces(part: Sequence[int], rows: Sequence[RowCost], micro_batch_tokens: int) -> list[list[int]]:
    """The group, or consecutive rows of it that are as many as fit."""
    pieces: list[list[int]] = []
    for index in part:
        if pieces and _tokens([*pieces[-1], index], rows) <= micro_batch_tokens:
            pieces[-1].append(index)
        else:
            pieces.append([index])
    return pieces
