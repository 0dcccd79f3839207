"""NaN and Inf, wherever they come from, on one rank. Several ranks are in test_ranks.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from argusrl.policy.policy import Policy
from argusrl.policy.rows import Row
from argusrl.policy.stats import Broken

INF, NAN = float("inf"), float("nan")


def with_logprob(row: Row, value: float) -> Row:
    first, *rest = row.turns
    return replace(row, turns=(replace(first, logprobs=(value, *first.logprobs[1:])), *rest))


@pytest.mark.parametrize(
    ("what", "spoil"),
    [
        ("advantage", lambda row: replace(row, advantage=NAN)),
        ("advantage", lambda row: replace(row, advantage=-INF)),
        ("engine log-probability", lambda row: with_logprob(row, NAN)),
        ("engine log-probability", lambda row: with_logprob(row, -INF)),  # its gradient is finite
        ("loss", lambda row: replace(with_logprob(row, -9.0), advantage=3e38)),  # twice it, by its weight
    ],
)
def test_bad_rows_are_found(policy: Policy, rows: Any, tokens: Any, what: str, spoil: Callable[[Row], Row]) -> None:
    before = policy.state_digest()
    policy.seal_state()
    stats = policy.forward_backward([[rows[1]], [], [spoil(rows[0]), rows[2]], [spoil(rows[1])]], tokens.response)
    assert stats.broken == Broken(rank=0, micro_batch=2, what=what)
    update = policy.optimizer_step(1e-2)
    assert (update.skipped, update.broken) == (f"non-finite {what}", stats.broken)
    assert policy.state_digest() == before
    policy.check_state()
    assert policy.forward_backward([rows], tokens.response).broken is None
    assert policy.optimizer_step(1e-2).skipped is None  # nothing of it stayed


def test_a_broken_model_is_found(policy: Policy, rows: Any, tokens: Any) -> None:
    with torch.no_grad():
        next(iter(policy.state.parameters.values())).to_local()[0, 0] = NAN
    stats = policy.forward_backward([[rows[1]]], tokens.response)
    assert stats.broken == Broken(rank=0, micro_batch=0, what="log-probability")


def test_discarded_rows_are_forgotten(policy: Policy, rows: Any, tokens: Any) -> None:
    policy.forward_backward([[replace(rows[0], advantage=NAN)]], tokens.response)
    policy.discard_gradients()
    policy.forward_backward([rows], tokens.response)
    assert policy.optimizer_step(1e-2).skipped is None


def test_huge_gradients_are_clipped_like_any_other(policy: Policy, rows: Any, tokens: Any) -> None:
    huge = [replace(row, advantage=row.advantage * 1e30) for row in rows]
    assert policy.forward_backward([huge], tokens.response).broken is None
    update = policy.optimizer_step(1e-3)
    assert update.skipped is None
    assert 1e28 < update.grad_norm < 1e32  # squares of it do not fit into float32
    assert all(tensor.isfinite().all() for tensor in policy.adapter_tensors().values())
    policy.forward_backward([rows], tokens.response)
    assert policy.optimizer_step(1e-3).skipped is None


def test_emulated_ranks_are_told_apart(policy: Policy, rows: Any, tokens: Any) -> None:
    bad = replace(rows[0], advantage=NAN)
    stats = policy.forward_backward_as([[[rows[0]], [bad]], [[rows[1]], [bad]], [[bad]]], tokens.response)
    assert stats.broken == Broken(rank=2, micro_batch=0, what="advantage")
    assert policy.optimizer_step(1e-2).skipped == "non-finite advantage"
