"""What a rank adds up over the micro-batches of an update, and what all ranks together make of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from argusrl.algorithms.losses import LossSums
from argusrl.policy.inputs import PackedBatch
from argusrl.policy.stats import Broken, Stats

_SUMS = ("loss", "entropy", "ratio", "clipped", "cut", "clamped", "gap", "kl", "tokens", "row_tokens")
_CHECKED = ("advantage", "engine log-probability", "log-probability", "loss", "gradient")
_WIDTH = len(_SUMS) + 3  # then the largest gap, the first broken micro-batch (-1: none), what broke in it


class Tally:
    """Of one rank. Everything stays on the device until the update is over: reading it earlier would stall a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._gap_max = self._sums.new_zeros(())
        self._finite: list[Tensor] = []  # per micro-batch [5] whether each of _CHECKED is finite

    def add(
        self, batch: PackedBatch, new: Tensor, entropies: Tensor, parts: LossSums, row_tokens: int, gradient: Tensor
    ) -> None:
        """One micro-batch after its backward. `new` is [N] detached; `gradient` says whether it is finite."""
        gap = (new - batch.engine).abs()
        own = (parts.ratio, parts.clipped, parts.cut, parts.clamped, gap.sum(), parts.kl)
        values = [parts.loss.detach(), entropies.sum(), *own]
        counts = [self._sums.new_tensor(count) for count in (len(gap), row_tokens)]
        self._sums += torch.stack([value.double() for value in values] + counts)
        if len(gap):
            self._gap_max = torch.maximum(self._gap_max, gap.max().double())
        checked = (batch.advantages, batch.engine, new, parts.loss.detach())
        self._finite.append(torch.stack([value.isfinite().all() for value in checked] + [gradient]))

    def row(self) -> Tensor:
        """[width] float64 on the device: what the ranks exchange."""
        found = self._sums.new_tensor([-1.0, 0.0])
        if self._finite:
            broken = (~torch.stack(self._finite)).cpu().nonzero()
            if len(broken):
                found = broken[0].to(found)
        return torch.cat([self._sums, self._gap_max[None], found])


def gather(tally: Tally, denominator_tokens: int) -> Stats:
    """The stats of all ranks' tallies; a collective, the only one."""
    row = tally.row()
    rows = row.new_empty(dist.get_world_size() * _WIDTH)
    dist.all_gather_single(rows, row)
    return _stats(rows.view(-1, _WIDTH), denominator_tokens)


def agree(tallies: Sequence[Tally], denominator_tokens: int) -> Stats:
    """The stats of tallies that every rank has computed, as rank 0 saw them; a collective."""
    rows = torch.stack([tally.row() for tally in tallies])
    dist.broadcast(rows, src=0)
    return _stats(rows, denominator_tokens)


def _stats(rows: Tensor, denominator_tokens: int) -> Stats:
    rows = rows.cpu()
    sums = dict(zip(_SUMS, rows[:, : len(_SUMS)].sum(dim=0).tolist(), strict=True))
    gap_max, *_ = rows[:, len(_SUMS) :].max(dim=0).values.tolist()
    tokens = int(sums["tokens"])
    mean = {name: sums[name] / max(1, tokens) for name in sums}
    return Stats(
        tokens=tokens,
        row_tokens=int(sums["row_tokens"]),
        loss=sums["loss"] / max(1, denominator_tokens),
        entropy=mean["entropy"],
        ratio=mean["ratio"],
        clip_share=mean["clipped"],
        cut_share=mean["cut"],
        clamped_tokens=int(sums["clamped"]),
        gap_mean=mean["gap"],
        gap_max=gap_max,
        kl=mean["kl"],
        broken=_first_broken(rows[:, -2:].long().tolist()),
    )


def _first_broken(found: Sequence[Sequence[int]]) -> Broken | None:
    """Of [ranks][micro-batch, what]: the earliest micro-batch, then the lowest rank."""
    seen = [(number, rank, what) for rank, (number, what) in enumerate(found) if number >= 0]
    if not seen:
        return None
    number, rank, what = min(seen)
    return Broken(rank=rank, micro_batch=number, what=_CHECKED[what])
