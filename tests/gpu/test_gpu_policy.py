from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from argusrl.policy.logprobs import token_logprobs
from fakes.benchmark import load_benchmark

GPU = load_benchmark("gpu_training")
LOAD = GPU.Load(prompts=2, group_size=4, text_tokens=30, response_tokens=40, image_side=128)


def groups_of(made: Any, *, shared: bool = True, load: Any = LOAD) -> list[list[Any]]:
    return GPU.make_groups(made.policy._inputs, made.scorer.base.config, load, shared=shared)


def logprobs(made: Any, batches: Sequence[Any]) -> torch.Tensor:
    return GPU.logprobs(made, batches).cpu()


def gradients(made: Any, rows: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Whole and on the CPU, of one micro-batch."""
    made.policy.forward_backward([rows], denominator_tokens=100)
    found = {name: p.grad.full_tensor().float().cpu() for name, p in made.policy.state.parameters.items()}
    made.policy.discard_gradients()
    return found


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_a_frozen_head_gives_what_the_cpu_gives(device: str, dtype: torch.dtype, limit: float) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator().manual_seed(0)
    rows, head = torch.randn(1100, 64, generator=generator), torch.randn(5000, 64, generator=generator) * 0.1
    targets, banned = torch.randint(9, 5000, (1100,), generator=generator), torch.tensor([3, 7])
    found = []
    for place in ("cpu", device):
        hidden = rows.to(place, torch.float32 if place == "cpu" else dtype).requires_grad_()
        weight = head.to(place, hidden.dtype)
        logs, entropies = token_logprobs(
            hidden, weight, None, targets.to(place), temperature=0.7, banned=banned.to(place)
        )
        (slopes,) = torch.autograd.grad(logs.sum(), hidden)
        found.append([logs.detach().cpu(), entropies.cpu(), slopes.float().cpu()])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() < limit * theirs.abs().max()


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_packed_rows_are_what_single_ones_are(make_policy: Callable[..., Any], dtype: str, limit: float) -> None:
    made = make_policy(dtype)
    rows = [row for group in groups_of(made) for row in group]
    alone = logprobs(made, [[row] for row in rows])
    assert (logprobs(made, [rows]) - alone).abs().max() < limit
    apart = [row for group in groups_of(made, shared=False) for row in group]
    with GPU.padded_batches(made):
        batched = logprobs(made, [apart])
    assert (logprobs(made, [apart]) - batched).abs().max() < limit


def test_gradients_in_bfloat16_are_near_those_in_float32(make_policy: Callable[..., Any]) -> None:
    exact = make_policy("float32")
    rows = [row for group in groups_of(exact) for row in group]
    expected = gradients(exact, rows)
    weights = {name: tensor.clone() for name, tensor in exact.scorer.state_dict().items()}
    rough = make_policy("bfloat16", checkpointing=True)
    with torch.no_grad():
        for name, tensor in rough.scorer.state_dict().items():
            tensor.copy_(weights[name])
    found = gradients(rough, rows)
    assert all(p.dtype == torch.float32 for p in rough.policy.state.parameters.values())
    flat, reference = (torch.cat([one[name].flatten() for name in sorted(expected)]) for one in (found, expected))
    assert (flat - reference).norm() < 0.1 * reference.norm()
    assert torch.nn.functional.cosine_similarity(flat, reference, dim=0) > 0.995


def test_checkpointing_gives_the_same_gradients(make_policy: Callable[..., Any]) -> None:
    plain = make_policy("float32")
    rows = groups_of(plain)[0]
    expected = gradients(plain, rows)
    plain.scorer.train()
    for name, gradient in gradients(plain, rows).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-4, atol=1e-7), name


def test_the_first_update_is_as_large_as_the_learning_rate(make_policy: Callable[..., Any]) -> None:
    made = make_policy("float32")
    rows = groups_of(made, load=replace(LOAD, prompts=1))[0]
    before = made.policy.adapter_tensors()
    made.policy.forward_backward([rows], denominator_tokens=100)
    update = made.policy.optimizer_step(1e-3)
    assert update.skipped is None
    after = made.policy.adapter_tensors()
    largest = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert largest == pytest.approx(1e-3, rel=0.05)  # whatever the gradient, with Adam


def test_handing_the_gpu_over_and_back_changes_no_bit(make_policy: Callable[..., Any], real: bool) -> None:
    made = make_policy("bfloat16")
    rows = groups_of(made)[0]
    made.policy.forward_backward([rows], denominator_tokens=100)
    made.policy.optimizer_step(1e-3)
    digest, numbers = made.policy.state_digest(), logprobs(made, [rows])
    used = torch.cuda.memory_allocated() if real else 0
    made.policy.offload()
    if real:
        assert torch.cuda.memory_allocated() < 0.2 * used
    made.policy.onload()
    assert made.policy.state_digest() == digest
    assert torch.equal(logprobs(made, [rows]), numbers)
    made.policy.forward_backward([rows], denominator_tokens=100)
    assert made.policy.optimizer_step(1e-3).skipped is None
