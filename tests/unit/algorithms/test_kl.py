import pytest
import torch

from argusrl.algorithms.kl import k3, with_kl
from argusrl.algorithms.losses import ClipSettings, clipped_policy_loss


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_known_values_and_gradients() -> None:
    new, reference = vector(-1.0, -1.5, -2.0).requires_grad_(), vector(-1.5, -1.0, -2.0)
    estimates = k3(new, reference)
    assert estimates.tolist() == pytest.approx([0.10653066, 0.14872127, 0.0], abs=1e-8)
    (gradient,) = torch.autograd.grad(estimates.sum(), new)
    expected = 1 - (reference - new).exp()
    assert gradient.tolist() == pytest.approx(expected.tolist())


def test_far_apart_stays_finite() -> None:
    new = vector(-1000.0, 0.0).requires_grad_()
    estimates = k3(new, vector(0.0, -1000.0))
    assert estimates.isfinite().all()
    (gradient,) = torch.autograd.grad(estimates.sum(), new)
    assert gradient.tolist() == [0.0, 0.0]


def test_it_is_added_unclipped_and_unweighted() -> None:
    new, engine, reference = vector(-1.0, -2.0).requires_grad_(), vector(-3.0, -2.5), vector(-1.3, -1.0)
    parts = clipped_policy_loss(new, new.detach(), engine, vector(0.0, 0.0), ClipSettings())
    total = with_kl(parts, new, reference, 0.5)
    assert parts.loss == parts.kl == 0
    assert total.loss.item() == pytest.approx(0.5 * k3(new, reference).sum().item())
    assert total.kl.item() == pytest.approx(2 * total.loss.item())
    assert not total.kl.requires_grad
