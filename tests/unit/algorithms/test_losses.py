import math

import pytest
import torch

from argusrl.algorithms.losses import ClipSettings, clipped_policy_loss


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_on_policy_loss_is_minus_advantage_and_gradient_flows() -> None:
    new = vector(-1.0, -2.0).requires_grad_()
    sums = clipped_policy_loss(new, new.detach(), new.detach(), vector(1.0, -0.5), ClipSettings())
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(-0.5)
    assert new.grad is not None
    assert new.grad.tolist() == [-1.0, 0.5]
    assert sums.ratio.item() == 2.0


def test_clip_removes_the_gradient_only_where_it_binds() -> None:
    log_ratios = vector(0.5, 0.5, -0.5, -0.5)
    new = log_ratios.clone().requires_grad_()
    old = vector(0, 0, 0, 0)
    sums = clipped_policy_loss(new, old, old, vector(1, -1, 1, -1), ClipSettings(0.2, 0.28))
    sums.loss.backward()
    assert new.grad is not None
    assert [g != 0 for g in new.grad.tolist()] == [False, True, True, False]
    assert sums.clipped.item() == 2
    assert sums.loss.item() == pytest.approx(-1.28 + math.exp(0.5) - math.exp(-0.5) + 0.8)


def test_importance_weight_is_cut_and_counted() -> None:
    new = vector(-1.0, -1.0)
    engine = vector(-3.0, -0.5)  # trainer is far more sure than the engine, then less
    sums = clipped_policy_loss(new, new, engine, vector(1.0, 1.0), ClipSettings(importance_cap=2.0))
    assert sums.loss.item() == pytest.approx(-2.0 - math.exp(-0.5))
    assert sums.cut.item() == 1
    uncorrected = clipped_policy_loss(new, new, engine, vector(1.0, 1.0), ClipSettings(importance_cap=None))
    assert uncorrected.loss.item() == -2.0


def test_absurd_log_ratio_is_clamped_and_counted() -> None:
    new = vector(0.0).requires_grad_()
    sums = clipped_policy_loss(new, vector(-1000.0), vector(-1000.0), vector(-1.0), ClipSettings())
    sums.loss.backward()
    assert torch.isfinite(sums.loss)
    assert sums.clamped.item() == 1
    assert new.grad is not None
    assert new.grad.item() == 0.0


def test_no_tokens() -> None:
    empty = vector()
    sums = clipped_policy_loss(empty, empty, empty, empty, ClipSettings())
    assert sums.loss.item() == 0.0
