from dataclasses import replace
from typing import Any

import pytest
import torch

from argusrl.errors import ModelError
from argusrl.policy import selftest
from argusrl.policy.attention import Segment, make_layout
from argusrl.policy.inputs import InputBuilder


def test_packed_equals_alone(random_model: Any) -> None:
    report = selftest.packing_parity(str(random_model))
    assert report["passed"]
    assert report["max_logit_error"] < 1e-5
    assert report["rows"] == 4


def test_notices_lost_borders(random_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = InputBuilder.pack

    def without_borders(self: InputBuilder, rows: list[Any]) -> Any:
        batch = pack(self, rows)
        return replace(
            batch, layout=make_layout([Segment(0, batch.input_ids.shape[1])])
        )  # one long sequence to attention

    monkeypatch.setattr(InputBuilder, "pack", without_borders)
    report = selftest.packing_parity(str(random_model))
    assert not report["passed"]
    assert report["max_logit_error"] > 1e-2


def test_random_model_is_the_same_for_a_seed_and_leaves_the_rng_alone(tmp_path: Any) -> None:
    before = torch.get_rng_state()
    first = selftest.make_random_model(tmp_path / "a", seed=3)
    second = selftest.make_random_model(tmp_path / "b", seed=3)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert torch.equal(torch.get_rng_state(), before)


def test_other_models_are_refused(tmp_path: Any) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="qwen3"):
        selftest.packing_parity(str(tmp_path))
