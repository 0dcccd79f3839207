"""Attention over sequences that lie side by side in one row; those of one prompt may share it.

Segments of like length are stacked and attended in one call: the cost follows each segment's own length times what it
sees, not the square of the row. transformers' own way (a T × T mask derived from position ids) costs that square, and
loses the borders without a word when a mask or a cache is passed along.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAME = "argusrl_packed"


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of a row that see themselves causally, and all of a prefix (another segment) before that."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """B segments of like length behind prefixes of equal length P, padded at their ends to L."""

    shape: tuple[int, int]  # (B, L)
    queries: Tensor  # [B · L] position in the row of every place; padding repeats the segment's last token
    keys: Tensor  # [B · (P + L)] the prefix's positions, then the segment's
    real: Tensor  # [n] query places that are no padding
    mask: Tensor | None  # [L, P + L] what a place sees; None without a prefix, where plain causality does


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """How a row of T tokens splits up. It is passed through the model's forward as `packed_layout`."""

    buckets: tuple[Bucket, ...]
    order: Tensor  # [T] for each position of the row, where the buckets' outputs hold it

    def to(self, device: str | torch.device) -> PackedLayout:
        return PackedLayout(tuple(_moved(bucket, device) for bucket in self.buckets), self.order.to(device))


def make_layout(segments: Sequence[Segment]) -> PackedLayout:
    """Layout of segments that cover a row, none of them empty. Lengths within a factor of √2 share a bucket."""
    members: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        members.setdefault((segment.prefix_length, math.ceil(2 * math.log2(segment.length))), []).append(segment)
    buckets = tuple(_bucket(alike) for _, alike in sorted(members.items()))
    places = torch.cat([bucket.queries[bucket.real] for bucket in buckets])
    order = torch.empty_like(places)
    order[places] = torch.arange(len(places))
    return PackedLayout(buckets, order)


def register() -> None:
    """Make the attention known to transformers by its NAME."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def _bucket(segments: Sequence[Segment]) -> Bucket:
    longest, prefix = max(segment.length for segment in segments), segments[0].prefix_length
    offsets = torch.arange(longest)[None]
    sizes = torch.tensor([segment.length for segment in segments])[:, None]
    queries = torch.tensor([segment.start for segment in segments])[:, None] + torch.minimum(offsets, sizes - 1)
    before = torch.tensor([segment.prefix_start for segment in segments])[:, None] + torch.arange(prefix)[None]
    return Bucket(
        shape=(len(segments), longest),
        queries=queries.flatten(),
        keys=torch.cat([before, queries], dim=1).flatten(),
        real=(offsets < sizes).flatten().nonzero()[:, 0],
        mask=torch.ones(longest, prefix + longest, dtype=torch.bool).tril(prefix) if prefix else None,
    )


def _moved(bucket: Bucket, device: str | torch.device) -> Bucket:
    mask = None if bucket.mask is None else bucket.mask.to(device)
    return Bucket(bucket.shape, bucket.queries.to(device), bucket.keys.to(device), bucket.real.to(device), mask)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    packed_layout: PackedLayout,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, heads, T, D] each -> [1, T, heads, D]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    outputs = []
    for bucket in packed_layout.buckets:
        stacked = [
            _stack(tensor, places, bucket.shape[0])
            for tensor, places in ((query, bucket.queries), (key, bucket.keys), (value, bucket.keys))
        ]
        attended, _weights = sdpa_attention_forward(
            module, *stacked, bucket.mask, scaling=scaling, is_causal=bucket.mask is None
        )
        outputs.append(attended.flatten(0, 1).index_select(0, bucket.real))
    return torch.cat(outputs).index_select(0, packed_layout.order)[None], None


def _stack(tensor: Tensor, places: Tensor, count: int) -> Tensor:
    """[1, heads, T, D] -> [B, heads, places / B, D]."""
    return tensor[0].transpose(0, 1).index_select(0, places).unflatten(0, (count, -1)).transpose(1, 2)
