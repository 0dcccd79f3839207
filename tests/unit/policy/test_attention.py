from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from argusrl.policy.attention import NAME, Segment, make_layout, register


@st.composite
def packed_rows(draw: st.DrawFn) -> list[Segment]:
    """Some sequences alone, some sharing a prefix."""
    segments, end = [], 0
    for _ in range(draw(st.integers(1, 4))):
        prefix = Segment(end, draw(st.integers(1, 40)))
        segments.append(prefix)
        end += prefix.length
        for _ in range(draw(st.integers(0, 4))):
            segments.append(Segment(end, draw(st.integers(1, 40)), prefix.start, prefix.length))
            end += segments[-1].length
    return segments


@given(packed_rows())
def test_every_token_has_one_place(segments: list[Segment]) -> None:
    layout = make_layout(segments)
    total = sum(segment.length for segment in segments)
    places = torch.cat([bucket.queries[bucket.real] for bucket in layout.buckets])
    assert sorted(places.tolist()) == list(range(total))
    assert torch.equal(places[layout.order], torch.arange(total))


@given(packed_rows())
def test_padding_is_bounded(segments: list[Segment]) -> None:
    for bucket in make_layout(segments).buckets:
        assert len(bucket.real) >= 0.7 * len(bucket.queries) - bucket.shape[0]


def packed_attention() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register()
    return ALL_ATTENTION_FUNCTIONS[NAME]


SEGMENTS = [
    Segment(0, 5),
    Segment(5, 1),
    Segment(6, 17),
    Segment(23, 6),  # shared by the three after it
    Segment(29, 4, 23, 6),
    Segment(33, 1, 23, 6),
    Segment(34, 3, 23, 6),
]
TOTAL = 37


@pytest.mark.parametrize("groups", [1, 2])
def test_equals_each_sequence_alone_with_gradients(groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    shapes = [4, 4 // groups, 4 // groups]
    tensors = [torch.randn(1, heads, TOTAL, 8, generator=generator).requires_grad_() for heads in shapes]
    weights = torch.randn(1, TOTAL, 4, 8, generator=generator)
    register()
    packed, _ = packed_attention()(module, *tensors, None, packed_layout=make_layout(SEGMENTS), scaling=0.3)
    gradients = torch.autograd.grad((packed * weights).sum(), tensors)

    visible = torch.zeros(TOTAL, TOTAL, dtype=torch.bool)
    for segment in SEGMENTS:
        own = slice(segment.start, segment.start + segment.length)
        visible[own, own] = torch.ones(segment.length, segment.length, dtype=torch.bool).tril()
        visible[own, segment.prefix_start : segment.prefix_start + segment.prefix_length] = True
    query, key, value = tensors
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~visible, float("-inf"))
    alone = (scores.softmax(-1) @ value).transpose(1, 2)
    torch.testing.assert_close(packed, alone)
    expected = torch.autograd.grad((alone * weights).sum(), tensors)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
