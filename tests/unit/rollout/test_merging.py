"""What is added to a weight. Merging inside vLLM is tested in tests/contracts/test_merging_engine.py."""

import pytest
import torch

from argusrl.rollout.merging import _Product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_pristine_weight_stays_as_it_is(dtype: torch.dtype) -> None:
    """A float32 checkpoint needs no conversion, and its tensors are the pristine ones themselves."""
    pristine = torch.ones(4, 3, dtype=dtype)
    change = _Product(a=torch.ones(2, 3), b=torch.ones(4, 2), scaling=0.5)
    merged = [change.added_to(pristine) for _ in range(2)]
    assert torch.equal(pristine, torch.ones(4, 3, dtype=dtype))
    assert all(torch.equal(one, torch.full((4, 3), 2.0, dtype=dtype)) for one in merged)
