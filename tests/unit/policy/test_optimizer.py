from types import SimpleNamespace

import pytest
import torch

from argusrl.policy.optimizer import gradient_norm


@pytest.mark.usefixtures("one_rank")
def test_norm_of_gradients() -> None:
    torch.manual_seed(0)
    shapes = ((5, 7), (1, 1), (3, 8, 2), (11,))
    gradients = {str(shape): torch.randn(shape) for shape in shapes}
    parameters = {name: SimpleNamespace(grad=gradient) for name, gradient in gradients.items()}
    parameters["unused"] = SimpleNamespace(grad=None)
    expected = torch.cat([gradient.double().flatten() for gradient in gradients.values()]).norm().item()
    assert gradient_norm(parameters) == pytest.approx(expected, rel=1e-14)
    assert gradient_norm({"unused": parameters["unused"]}) == 0.0


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_norm_of_a_broken_gradient(value: float) -> None:
    gradient = torch.ones(3, 3)
    gradient[1, 1] = value
    norm = gradient_norm({"a": SimpleNamespace(grad=gradient)})
    assert norm != norm or norm == float("inf")
