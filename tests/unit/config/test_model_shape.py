from pathlib import Path
from typing import Any

import pytest
import torch

from argusrl.config.model_shape import ModelShape
from argusrl.errors import ModelError
from fakes.benchmark import load_benchmark

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def on_paper(config: Any) -> Any:
    """The model of a config without memory for its weights."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if config.model_type == "qwen3_vl" else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config)


def config_of(kind: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{**TEXT, **changes})


def qwen3_vl(**changes: Any) -> Any:
    from transformers import Qwen3VLConfig

    values = load_benchmark("gpu_training").SMALL | changes
    return Qwen3VLConfig(**values)


def qwen3_vl_8b() -> Any:
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(**load_benchmark("gpu_training").QWEN3_VL_8B)


CONFIGS = {
    "llama": lambda: config_of("llama", tie_word_embeddings=False),
    "llama with biases": lambda: config_of("llama", attention_bias=True, mlp_bias=True),
    "qwen2, tied": lambda: config_of("qwen2", tie_word_embeddings=True),
    "qwen3, heads of their own width": lambda: config_of("qwen3", head_dim=24),
    "qwen3_vl": qwen3_vl,
    "qwen3_vl, tied": lambda: qwen3_vl(tie_word_embeddings=True),
    "qwen3_vl 8B": qwen3_vl_8b,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    config.save_pretrained(tmp_path)
    shape, model = ModelShape.read(tmp_path), on_paper(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    layers = model.get_decoder().layers
    assert shape.layer_parameters == sum(p.numel() for p in layers[0].parameters())
    assert shape.head_parameters == model.get_output_embeddings().weight.numel()
    if shape.vision is not None:
        tower = model.model.visual
        assert shape.vision.parameters == sum(p.numel() for p in tower.parameters())
        assert shape.vision.block_parameters == sum(p.numel() for p in tower.blocks[0].parameters())
        blocks = (*layers, *tower.blocks)
        inside = {id(p) for block in blocks for p in block.parameters()}
        assert shape.root_parameters == sum(p.numel() for p in model.parameters() if id(p) not in inside)


@pytest.mark.parametrize("target", ["language", ("q_proj", "down_proj")])
@pytest.mark.parametrize("name", ["llama", "qwen3_vl", "qwen3_vl 8B"])
def test_an_adapter_has_the_parameters_of_the_real_one(name: str, target: Any) -> None:
    from argusrl.policy.lora import add_lora
    from argusrl.policy.settings import PolicySettings

    config = CONFIGS[name]()
    model = on_paper(config).requires_grad_(False)
    settings = PolicySettings(model="some/model", device="cpu", dtype="float32", rank=8, alpha=16.0, target=target)
    trained = sum(p.numel() for p in add_lora(model, settings).parameters() if p.requires_grad)
    assert ModelShape.from_json(config.to_dict()).lora_parameters(8, target) == trained


def test_numbers_of_the_8b_model() -> None:
    shape = ModelShape.from_json(qwen3_vl_8b().to_dict())
    assert shape.kv_bytes_per_token(2) == 144 << 10
    assert shape.lora_parameters(32) == 87_293_952
    assert shape.layers * shape.layer_weights == 6_945_767_424
    assert shape.vision is not None
    assert shape.vision.patches(1 << 20) == 4096
    assert shape.vision.tokens(4096) == 1024


def test_work_counts_the_head_for_predicted_tokens_alone() -> None:
    shape = ModelShape.from_json(qwen3_vl().to_dict())
    layers, head = shape.layers * shape.layer_weights, shape.head_parameters
    assert shape.training_flops(10, 4) == 4 * (10 * layers + 4 * head)


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(ModelError, match="mamba") as caught:
        ModelShape.from_json({"model_type": "mamba"})
    assert "qwen3_vl" in caught.value.hint


def test_what_config_json_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="num_hidden_layers"):
        ModelShape.from_json({"model_type": "llama", "num_attention_heads": 2})
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelShape.read(tmp_path)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("text_config", "hidden_size", -4),
        ("text_config", "hidden_size", True),
        ("text_config", "num_hidden_layers", 0),
        ("text_config", "vocab_size", "many"),
        ("vision_config", "spatial_merge_size", 0),
        ("vision_config", "deepstack_visual_indexes", 3),
        (None, "text_config", None),
        (None, "vision_config", [1]),
    ],
)
def test_a_config_that_describes_no_model_is_refused(section: str | None, key: str, value: object) -> None:
    config = qwen3_vl().to_dict()
    (config if section is None else config[section])[key] = value
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelShape.from_json(config)


@pytest.mark.parametrize("content", ["[1]", "null", '"text"'])
def test_a_config_that_is_no_mapping_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match="not the settings of a model"):
        ModelShape.read(tmp_path)
