from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from argusrl.config.estimate import MicroBatch, training_memory
from fakes.benchmark import load_benchmark
from fakes.live_bytes import LiveBytes

GPU = load_benchmark("gpu_training")
BIG = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SMALL = {"intermediate_size": 640, "num_hidden_layers": 4, "vocab_size": 2048}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_needs_the_memory_that_was_estimated(
    make_policy: Callable[..., Any], device: str, real: bool, checkpointing: bool
) -> None:
    made = make_policy("bfloat16", checkpointing, **(BIG if real else SMALL))
    load = GPU.Load(2, 4, 100, 200, 256) if real else GPU.Load(2, 4, 40, 60, 128)
    rows = [
        row
        for group in GPU.make_groups(made.policy._inputs, made.scorer.base.config, load, shared=True)
        for row in group
    ]
    batch = MicroBatch.of_groups(
        load.prompts,
        prompt_tokens=len(rows[0].turns[0].prompt_ids),
        response_tokens=load.response_tokens,
        group_size=load.group_size,
        patches=(load.image_side // 16) ** 2,
    )
    expected = training_memory(
        made.shape,
        batch,
        element_bytes=2,
        rank=GPU.LORA_RANK,
        gradient_checkpointing=checkpointing,
        attention="varlen" if real else "gathered",
    )
    if real:
        made.policy.forward_backward([rows], denominator_tokens=100)  # cuBLAS takes its workspace
        made.policy.discard_gradients()
        workspace = torch.cuda.memory_allocated() - expected.resident
        torch.cuda.reset_peak_memory_stats()
        made.policy.forward_backward([rows], denominator_tokens=100)
        assert torch.cuda.max_memory_allocated() - workspace == pytest.approx(expected.total, rel=0.1)
        return
    with LiveBytes() as counted:
        made.policy.forward_backward([rows], denominator_tokens=100)
    assert counted.peak + expected.resident == pytest.approx(expected.total, rel=0.1)
