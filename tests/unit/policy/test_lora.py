import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from argusrl.errors import ModelError
from argusrl.policy.attention import Segment, make_layout
from argusrl.policy.lora import adapted_layers, add_lora, load_initial, peft_name, without_adapter
from argusrl.policy.model import load_model

FILE = "adapter_model.safetensors"


@pytest.fixture
def wrapped(settings: Any) -> Any:
    return add_lora(load_model(settings, reader=True), settings)


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {peft_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def test_only_the_language_model_is_adapted(wrapped: Any) -> None:
    names = trained(wrapped)
    assert len(names) == 2 * 7 * 2  # layers, linear layers, A and B
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    assert "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert not any("visual" in name or "lm_head" in name for name in names)


def test_start_is_seeded_by_name_alone(settings: Any, wrapped: Any) -> None:
    fewer = trained(add_lora(load_model(settings, reader=True), replace(settings, target=("v_proj",))))
    everything = trained(wrapped)
    assert len(fewer) == 4
    assert all(torch.equal(value, everything[name]) for name, value in fewer.items())
    other = trained(add_lora(load_model(settings, reader=True), replace(settings, seed=1)))
    a = next(name for name in everything if "lora_A" in name)
    assert not torch.equal(everything[a], other[a])
    assert all((value == 0).all() for name, value in everything.items() if "lora_B" in name)


def test_unknown_target_lists_what_there_is(settings: Any) -> None:
    with pytest.raises(ModelError, match="qkv") as caught:
        add_lora(load_model(settings, reader=True), replace(settings, target=("q_proj", "qkv")))
    assert "gate_proj" in caught.value.hint


def peft_folder(folder: Path, wrapped: Any, **changes: Any) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "init_lora_weights": True, **changes}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    halves = {name: torch.full_like(value, 0.5) for name, value in trained(wrapped).items()}
    save_file(halves, folder / FILE)
    return folder


def test_initial_adapter_is_taken(settings: Any, wrapped: Any, tmp_path: Path) -> None:
    load_initial(wrapped, peft_folder(tmp_path / "a", wrapped), settings)
    assert all((value == 0.5).all() for value in trained(wrapped).values())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"r": 16}, "its rank is 16, adapter.rank is 4"),
        ({"lora_alpha": 4}, "its alpha is 4, adapter.alpha is 8"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"bias": "all"}, "biases"),
    ],
)
def test_initial_adapters_that_cannot_be(
    settings: Any, wrapped: Any, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        load_initial(wrapped, peft_folder(tmp_path / "a", wrapped, **changes), settings)
    assert all((value == 0).all() for name, value in trained(wrapped).items() if "lora_B" in name)


def test_all_problems_at_once(settings: Any, wrapped: Any, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "a", wrapped, r=2, use_dora=True)
    foreign = {"base_model.model.model.layers.0.q.lora_A.weight": torch.ones(1, 1)}
    save_file(foreign, folder / FILE)
    with pytest.raises(ModelError) as caught:
        load_initial(wrapped, folder, settings)
    for part in ("rank is 2", "use_dora", "it lacks", "not a target here"):
        assert part in caught.value.message


def test_not_a_peft_folder(settings: Any, wrapped: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a PEFT adapter"):
        load_initial(wrapped, tmp_path, settings)


def test_what_cannot_be_adapted_is_told_without_reading_weights(settings: Any, wrapped: Any, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "a", wrapped)
    assert "q_proj" in adapted_layers(replace(settings, initial=folder))
    renamed = {name.replace("q_proj", "query"): tensor for name, tensor in load_file(folder / FILE).items()}
    save_file(renamed, folder / FILE)
    with pytest.raises(ModelError, match=r"lacks .*q_proj.*\n.*query.* not a target here"):
        adapted_layers(replace(settings, initial=folder))
    with pytest.raises(ModelError, match="qkv"):
        adapted_layers(replace(settings, target=("qkv",)))


def test_without_adapter_is_the_base(wrapped: Any) -> None:
    row = {
        "input_ids": torch.tensor([[10, 11, 12, 13]]),
        "packed_layout": make_layout([Segment(0, 4)]),
        "use_cache": False,
    }
    with torch.no_grad():
        fresh = wrapped(**row).logits
        for value in trained(wrapped).values():
            value += 0.1
        changed = wrapped(**row).logits
        with without_adapter(wrapped):
            base = wrapped(**row).logits
        again = wrapped(**row).logits
    assert torch.equal(base, fresh)
    assert not torch.allclose(changed, fresh)
    assert torch.equal(again, changed)
