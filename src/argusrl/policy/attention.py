"""Attention over sequences that lie side by side in one row and share their beginnings, as a tree of segments.

A layout says who sees whom, and how that is computed; transformers hands it through the model's forward to the one
attention function that is registered here. transformers' own way (a T × T mask derived from position ids) costs the
square of the row, and loses the borders without a word when a mask or a cache is passed along.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

NAME = "argusrl_packed"
Strategy = Literal["mask", "gathered", "varlen"]

_SHORT = 8  # segments up to this length share a bucket: their padding costs less than another call


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of a row that see all of their ancestors, and themselves causally."""

    start: int
    length: int
    parent: int | None = None  # which of the segments it continues; it comes before this one


class PackedLayout(ABC):
    """How a row of T tokens is attended. It is passed through the model's forward as `packed_layout`."""

    @property
    @abstractmethod
    def places(self) -> int:
        """Query places that are computed, padding included."""

    @property
    @abstractmethod
    def padding(self) -> int:
        """Of them, those that hold no token."""

    @abstractmethod
    def to(self, device: str | torch.device) -> Self: ...

    @abstractmethod
    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """[1, heads, T, D] each -> [1, T, heads, D]."""


def make_layout(segments: Sequence[Segment], strategy: Strategy = "gathered") -> PackedLayout:
    """Layout of segments that cover a row in their order, none of them empty."""
    if strategy == "mask":
        return MaskLayout(_visible(segments)[None, None])
    if strategy == "varlen":
        return VarlenLayout.of(segments)
    return GatheredLayout.of(segments)


def choose_strategy(device: torch.device, dtype: torch.dtype) -> Strategy:
    """varlen where its kernel runs and aligns queries with the ends of their keys; gathered elsewhere."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _varlen_agrees(device, dtype):
        return "varlen"
    return "gathered"


def register() -> None:
    """Make the attention known to transformers by its NAME."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)


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
    return packed_layout.attend(module, query, key, value, scaling), None


# ---------------------------------------------------------------------- mask: the reference


@dataclass(frozen=True, slots=True)
class MaskLayout(PackedLayout):
    """One call with an explicit mask. It says plainly what the others must equal, at the cost of the row's square."""

    mask: Tensor  # [1, 1, T, T] what a token sees

    @property
    def places(self) -> int:
        return self.mask.shape[-1]

    @property
    def padding(self) -> int:
        return 0

    def to(self, device: str | torch.device) -> Self:
        return type(self)(self.mask.to(device))

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attended, _weights = sdpa_attention_forward(module, query, key, value, self.mask, scaling=scaling)
        return attended


def _visible(segments: Sequence[Segment]) -> Tensor:
    """[T, T] what a token sees."""
    total = sum(segment.length for segment in segments)
    visible = torch.zeros(total, total, dtype=torch.bool)
    for segment in segments:
        own = slice(segment.start, segment.start + segment.length)
        visible[own, own] = torch.ones(segment.length, segment.length, dtype=torch.bool).tril()
        for before in _ancestors(segments, segment):
            visible[own, before.start : before.start + before.length] = True
    return visible


def _ancestors(segments: Sequence[Segment], segment: Segment) -> list[Segment]:
    """From the first one on."""
    found = []
    while segment.parent is not None:
        segment = segments[segment.parent]
        found.append(segment)
    return found[::-1]


# ---------------------------------------------------------------------- gathered: any device


@dataclass(frozen=True, slots=True)
class Bucket:
    """B segments of like length behind ancestors of like length, padded to L and P, in one call."""

    shape: tuple[int, int]  # (B, L)
    queries: Tensor  # [B · L] position in the row of every place; padding repeats the segment's last token
    keys: Tensor  # [B · (P + L)] the ancestors' positions, then the segment's
    real: Tensor  # [n] query places that are no padding
    mask: Tensor | None  # [B, 1, L, P + L] what a place sees; None without ancestors, where plain causality does

    @classmethod
    def of(cls, members: Sequence[tuple[Segment, Tensor]]) -> Bucket:
        """`members` are segments and the [p] positions of their ancestors' tokens."""
        sizes = torch.tensor([segment.length for segment, _ in members])[:, None]
        seen = torch.tensor([len(before) for _, before in members])[:, None]
        longest, most = int(sizes.max()), int(seen.max())
        offsets, places = torch.arange(longest)[None], torch.arange(most)[None]
        queries = torch.tensor([segment.start for segment, _ in members])[:, None] + torch.minimum(offsets, sizes - 1)
        before = torch.nn.utils.rnn.pad_sequence([before for _, before in members], batch_first=True)
        mask = None
        if most:
            own = torch.ones(longest, longest, dtype=torch.bool).tril().expand(len(members), -1, -1)
            ancestors = (places < seen)[:, None].expand(-1, longest, -1)
            mask = torch.cat([ancestors, own], dim=2)[:, None]
        return cls(
            shape=(len(members), longest),
            queries=queries.flatten(),
            keys=torch.cat([before, queries], dim=1).flatten(),
            real=(offsets < sizes).flatten().nonzero()[:, 0],
            mask=mask,
        )

    def to(self, device: str | torch.device) -> Bucket:
        mask = None if self.mask is None else self.mask.to(device)
        return Bucket(self.shape, self.queries.to(device), self.keys.to(device), self.real.to(device), mask)


@dataclass(frozen=True, slots=True)
class GatheredLayout(PackedLayout):
    """The ancestors' keys and values are repeated for each segment; segments of like lengths share a call.

    The cost follows each segment's length times what it sees.
    """

    buckets: tuple[Bucket, ...]
    order: Tensor  # [T] for each position of the row, where the buckets' outputs hold it

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Self:
        """Lengths within a factor of √2, and ancestors' within 2^¼, share a bucket."""
        places = [torch.arange(segment.start, segment.start + segment.length) for segment in segments]
        paths: list[Tensor] = []  # the ancestors' positions
        members: dict[tuple[int, int], list[tuple[Segment, Tensor]]] = {}
        for segment in segments:
            above = segment.parent
            paths.append(places[0][:0] if above is None else torch.cat([paths[above], places[above]]))
            alike = (_size_class(len(paths[-1]), 4), _size_class(segment.length, 2))
            members.setdefault(alike, []).append((segment, paths[-1]))
        buckets = tuple(Bucket.of(alike) for _, alike in sorted(members.items(), key=lambda item: item[0]))
        found = torch.cat([bucket.queries[bucket.real] for bucket in buckets])
        order = torch.empty_like(found)
        order[found] = torch.arange(len(found))
        return cls(buckets, order)

    @property
    def places(self) -> int:
        return sum(len(bucket.queries) for bucket in self.buckets)

    @property
    def padding(self) -> int:
        return self.places - len(self.order)

    def to(self, device: str | torch.device) -> Self:
        return type(self)(tuple(bucket.to(device) for bucket in self.buckets), self.order.to(device))

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        outputs = []
        for bucket in self.buckets:
            stacked = [
                _stack(tensor, places, bucket.shape[0])
                for tensor, places in ((query, bucket.queries), (key, bucket.keys), (value, bucket.keys))
            ]
            attended, _weights = sdpa_attention_forward(
                module, *stacked, bucket.mask, scaling=scaling, is_causal=bucket.mask is None
            )
            outputs.append(attended.flatten(0, 1).index_select(0, bucket.real))
        return torch.cat(outputs).index_select(0, self.order)[None]


def _size_class(length: int, per_octave: int) -> int:
    """Equal for lengths that may share a bucket; -1 for none at all."""
    return math.ceil(per_octave * math.log2(max(length, _SHORT))) if length else -1


def _stack(tensor: Tensor, places: Tensor, count: int) -> Tensor:
    """[1, heads, T, D] -> [B, heads, places / B, D]."""
    return tensor[0].transpose(0, 1).index_select(0, places).unflatten(0, (count, -1)).transpose(1, 2)


# ---------------------------------------------------------------------- varlen: one flash call


@dataclass(frozen=True, slots=True)
class VarlenLayout(PackedLayout):
    """One flash call for all segments, without a mask: queries are aligned with the ends of their keys."""

    keys: Tensor  # [K] for every segment the positions of its ancestors, then its own
    query_ends: Tensor  # [S + 1] int32, cumulative
    key_ends: Tensor  # [S + 1] int32, cumulative
    longest: tuple[int, int]  # queries and keys of one segment, at most
    tokens: int

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Self:
        own = [torch.arange(segment.start, segment.start + segment.length) for segment in segments]
        seen: list[Tensor] = []
        for segment, places in zip(segments, own, strict=True):
            seen.append(places if segment.parent is None else torch.cat([seen[segment.parent], places]))
        return cls(
            keys=torch.cat(seen),
            query_ends=_ends(own),
            key_ends=_ends(seen),
            longest=(max(map(len, own)), max(map(len, seen))),
            tokens=sum(map(len, own)),
        )

    @property
    def places(self) -> int:
        return self.tokens

    @property
    def padding(self) -> int:
        return 0

    def to(self, device: str | torch.device) -> Self:
        return type(self)(
            self.keys.to(device), self.query_ends.to(device), self.key_ends.to(device), self.longest, self.tokens
        )

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        attended = varlen_attn(
            query,
            key.index_select(0, self.keys),
            value.index_select(0, self.keys),
            self.query_ends,
            self.key_ends,
            *self.longest,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended[None]


def _ends(pieces: Sequence[Tensor]) -> Tensor:
    return torch.tensor([0, *map(len, pieces)], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def _varlen_agrees(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel exists here and gives what the mask gives, for a small tree, forward and backward."""
    from types import SimpleNamespace

    segments = [Segment(0, 9), Segment(9, 4, 0), Segment(13, 1, 1), Segment(14, 7, 0)]
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 21, 64), (1, 2, 21, 64), (1, 2, 21, 64)]
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    found = []
    strategies: tuple[Strategy, ...] = ("mask", "varlen")
    for strategy in strategies:
        query, key, value = (tensor.clone().requires_grad_() for tensor in drawn)
        try:
            attended = make_layout(segments, strategy).to(device).attend(module, query, key, value, 0.125)
            found.append([attended, *torch.autograd.grad(attended.float().square().sum(), (query, key, value))])
        except (ImportError, RuntimeError, NotImplementedError):
            return False
    return all((ours - theirs).abs().max() < 0.05 * theirs.abs().max() for theirs, ours in zip(*found, strict=True))
