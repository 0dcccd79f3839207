from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argusrl.policy.attention import NAME, GatheredLayout, Segment, choose_strategy, make_layout, register

STRATEGIES = ["mask", "gathered"]


@st.composite
def trees(draw: st.DrawFn) -> list[Segment]:
    """Some sequences alone, some continuing others, to any depth."""
    segments: list[Segment] = []
    for number in range(draw(st.integers(1, 10))):
        parent = draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
        end = segments[-1].start + segments[-1].length if segments else 0
        segments.append(Segment(end, draw(st.integers(1, 40)), parent))
    return segments


@given(trees())
def test_every_token_has_one_place(segments: list[Segment]) -> None:
    layout = make_layout(segments)
    assert isinstance(layout, GatheredLayout)
    total = sum(segment.length for segment in segments)
    places = torch.cat([bucket.queries[bucket.real] for bucket in layout.buckets])
    assert sorted(places.tolist()) == list(range(total))
    assert torch.equal(places[layout.order], torch.arange(total))
    assert layout.places - layout.padding == total


@given(st.lists(st.integers(8, 200), min_size=1, max_size=20))
def test_padding_is_bounded(lengths: list[int]) -> None:
    segments: list[Segment] = []
    for length in lengths:
        segments.append(Segment(sum(lengths[: len(segments)]), length))
    layout = make_layout(segments)
    assert layout.padding <= 0.3 * layout.places


def test_like_lengths_share_a_call() -> None:
    """Replies of several groups, whose prompts differ a little in length."""
    segments = [Segment(0, 100), Segment(100, 101), Segment(201, 30, 0), Segment(231, 31, 1), Segment(262, 26, 0)]
    layout = make_layout(segments)
    assert isinstance(layout, GatheredLayout)
    assert [bucket.shape for bucket in layout.buckets] == [(2, 101), (3, 31)]


def attend(strategy: Any, segments: list[Segment], tensors: list[torch.Tensor], groups: int) -> torch.Tensor:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    register()
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True)
    layout = make_layout(segments, strategy).to(tensors[0].device)
    return ALL_ATTENTION_FUNCTIONS[NAME](module, *tensors, None, packed_layout=layout, scaling=0.3)[0]


def plain(segments: list[Segment], tensors: list[torch.Tensor], groups: int) -> torch.Tensor:
    """Token by token, each with the tokens on its path."""
    query, key, value = tensors
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    rows = []
    for segment in segments:
        seen: list[int] = []
        above = segment.parent
        while above is not None:
            seen += range(segments[above].start, segments[above].start + segments[above].length)
            above = segments[above].parent
        for place in range(segment.start, segment.start + segment.length):
            seen.append(place)
            scores = torch.einsum("hd,hkd->hk", query[0, :, place], key[0][:, seen]) * 0.3
            rows.append(torch.einsum("hk,hkd->hd", scores.softmax(-1), value[0][:, seen]))
    return torch.stack(rows)[None]


def draw(total: int, groups: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [4, 4 // groups, 4 // groups]
    tensors = [torch.randn(1, heads, total, 8, generator=generator).requires_grad_() for heads in shapes]
    return tensors, torch.randn(1, total, 4, 8, generator=generator)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=25, deadline=None)
@given(trees(), st.sampled_from([1, 2, 4]), st.integers(0, 1000))
def test_equals_each_token_alone_with_gradients(strategy: str, segments: list[Segment], groups: int, seed: int) -> None:
    total = sum(segment.length for segment in segments)
    tensors, weights = draw(total, groups, seed)
    ours, theirs = attend(strategy, segments, tensors, groups), plain(segments, tensors, groups)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad((out * weights).sum(), tensors) for out in (ours, theirs)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_cpu_gathers() -> None:
    assert choose_strategy(torch.device("cpu"), torch.bfloat16) == "gathered"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen attention has a kernel for CUDA only")
@pytest.mark.parametrize("seed", range(5))
def test_varlen_equals_the_mask(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    segments: list[Segment] = []
    for number in range(12):
        end = segments[-1].start + segments[-1].length if segments else 0
        parent = int(torch.randint(-1, number, (1,), generator=generator)) if number else -1
        length = int(torch.randint(1, 200, (1,), generator=generator))
        segments.append(Segment(end, length, None if parent < 0 else parent))
    total = segments[-1].start + segments[-1].length
    shapes = [(1, 8, total, 64), (1, 2, total, 64), (1, 2, total, 64)]
    tensors = [torch.randn(s, generator=generator).to("cuda", torch.bfloat16).requires_grad_() for s in shapes]
    found = []
    for strategy in ("mask", "varlen"):
        attended = attend(strategy, segments, tensors, 4)
        found.append([attended, *torch.autograd.grad(attended.float().square().sum(), tensors)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)
