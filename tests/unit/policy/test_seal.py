from pathlib import Path
from typing import Any

import pytest
import torch

from argusrl.errors import CorruptionError
from argusrl.policy.policy import Policy
from argusrl.policy.seal import Seal

WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int64: torch.int64}


@pytest.mark.parametrize("dtype", WORDS)
def test_any_single_bit_shows(dtype: torch.dtype) -> None:
    tensors = {"a": torch.zeros(3), "b": torch.arange(1001).to(dtype), "c": torch.empty(0)}
    seal = Seal(tensors)
    assert seal.broken(tensors) == []
    words = tensors["b"].view(WORDS[dtype])
    bits = 8 * words.element_size()
    for bit in range(bits):
        place = 999 - 15 * bit
        mask = torch.tensor(1, dtype=words.dtype) << bit
        words[place] ^= mask
        assert seal.broken(tensors) == ["b"]
        words[place] ^= mask
    assert seal.broken(tensors) == []


def test_a_nan_of_another_kind_shows() -> None:
    tensors = {"x": torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)}
    seal = Seal(tensors)
    tensors["x"].view(torch.int32)[0] ^= 1
    assert seal.broken(tensors) == ["x"]


@pytest.mark.parametrize("kind", ["parameter", "exp_avg", "exp_avg_sq", "frozen"])
def test_the_policy_names_rank_and_tensor(policy: Policy, kind: str) -> None:
    policy.seal_state()
    policy.check_state()
    name, tensor = next((n, t) for n, t in policy._at_rest().items() if n.startswith(f"{kind}/"))
    with torch.no_grad():
        tensor.to_local().view(torch.int32).view(-1)[-1] ^= 1
    with pytest.raises(CorruptionError, match=rf"rank 0: 1 of \d+ tensors .* is {name}"):
        policy.check_state()


def test_learning_and_loading_are_no_corruption(policy: Policy, rows: Any, tokens: Any, tmp_path: Path) -> None:
    policy.check_state()  # nothing sealed yet
    policy.seal_state()
    policy.forward_backward([rows], tokens.response)
    policy.check_state()
    assert policy.optimizer_step(1e-2).skipped is None
    policy.check_state()  # an update ends the seal
    policy.seal_state()
    checkpoint = policy.save_checkpoint(tmp_path / "checkpoint").result(timeout=60)
    adapter = tmp_path / policy.publish_adapter(tmp_path / "adapters" / "v1", 1, 1).result().path
    policy.forward_backward([rows], tokens.response)
    policy.optimizer_step(1e-2)
    for load, folder in ((policy.load_checkpoint, checkpoint), (policy.load_adapter, adapter)):
        load(folder)
        policy.check_state()
        with torch.no_grad():
            next(iter(policy.state.parameters.values())).to_local().view(torch.int32)[0, 0] ^= 1
        with pytest.raises(CorruptionError):  # sealed anew
            policy.check_state()
