from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from argusrl.policy.attention import Segment, choose_strategy, make_layout
from fakes.benchmark import load_benchmark

QWEN3_VL_8B_HEADS = {"heads": 32, "kv_heads": 8, "width": 128}


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("replies", [[512, 100, 1, 63, 64, 65], [2]])
def test_strategies_agree_with_plain_attention(device: str, real: bool, dtype: str, limit: float, replies: Any) -> None:
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    sizes = QWEN3_VL_8B_HEADS if real else {"heads": 8, "kv_heads": 2, "width": 16}
    errors = load_benchmark("gpu_training").attention_errors(
        device, getattr(torch, dtype), prefix=1200 if real else 70, replies=replies, **sizes
    )
    ran = {name: found for name, found in errors.items() if "cannot_run" not in found}
    assert {"mask", "gathered"} <= ran.keys()
    assert max(max(found.values()) for found in ran.values()) < limit, errors
    if real and dtype == "bfloat16":
        assert "varlen" in ran, errors["varlen"]


def test_a_gpu_gets_the_flash_call(device: str, real: bool) -> None:
    expected = "varlen" if real else "gathered"
    assert choose_strategy(torch.device(device), torch.bfloat16) == expected
    assert choose_strategy(torch.device(device), torch.float32) == "gathered"


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128])
@pytest.mark.parametrize("prefix", [1, 64, 200])
def test_queries_are_aligned_with_the_ends_of_their_keys(device: str, real: bool, prefix: int, length: int) -> None:
    """The value of the key right before a query's own place is the largest; a shifted diagonal would lose it."""
    segments = [Segment(0, prefix), Segment(prefix, length, parent=0), Segment(prefix + length, length, parent=0)]
    total, width = prefix + 2 * length, 64
    layout = make_layout(segments, "varlen" if real else "gathered").to(device)
    query = torch.zeros(1, 2, total, width, device=device, dtype=torch.bfloat16)
    places = torch.arange(total, device=device).float().to(torch.bfloat16)
    value = places[None, None, :, None].expand(1, 2, total, width).contiguous()
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    means = layout.attend(module, query, query, value, 1.0)[0, :, 0, 0].float().cpu()  # of what each place sees
    numbers = torch.arange(total).float().to(torch.bfloat16).float()
    for segment in segments:
        before = numbers[:0] if segment.parent is None else numbers[:prefix]
        for offset in (0, segment.length - 1):
            seen = torch.cat([before, numbers[segment.start : segment.start + offset + 1]])
            assert means[segment.start + offset] == pytest.approx(float(seen.mean()), rel=1e-2, abs=1e-2)
