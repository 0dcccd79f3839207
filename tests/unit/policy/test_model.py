import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from argusrl.config.sections import Config
from argusrl.errors import ModelError
from argusrl.policy.model import decoder_prefix, load_model, packs, read_config
from argusrl.policy.settings import PolicySettings


def test_reader_has_weights_and_others_have_none(settings: Any, base: Any) -> None:
    other = load_model(settings, reader=False)
    assert {p.device.type for p in other.parameters()} == {"meta"}
    assert {n: (p.shape, p.dtype) for n, p in other.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in base.named_parameters()
    }
    assert not any(p.requires_grad for p in base.parameters())
    assert decoder_prefix(base) == "model.language_model"
    assert packs(base.config)


@pytest.mark.parametrize(
    ("kind", "packed"), [("default", True), ("llama3", True), ("dynamic", False), ("longrope", False)]
)
def test_positions_scaled_by_the_length_of_a_row_do_not_share_rows(kind: str, packed: bool) -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32)
    config.rope_parameters = {**(config.rope_parameters or {}), "rope_type": kind}
    assert packs(config) is packed


def damaged(random_model: Path, folder: Path, name: str, content: bytes | None) -> str:
    shutil.copytree(random_model, folder)
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "content"), [("config.json", None), ("model.safetensors", None), ("model.safetensors", b"\0" * 100)]
)
def test_damaged_folders(random_model: Path, settings: Any, tmp_path: Path, name: str, content: bytes | None) -> None:
    path = damaged(random_model, tmp_path / "m", name, content)
    with pytest.raises(ModelError) as caught:
        load_model(replace(settings, model=path), reader=True)
    assert path in caught.value.message


def test_missing_weights_are_named(random_model: Path, settings: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = Path(damaged(random_model, tmp_path / "m", "config.json", (random_model / "config.json").read_bytes()))
    tensors = load_file(path / "model.safetensors")
    gone = next(name for name in tensors if "layers.1.mlp.up_proj" in name)
    del tensors[gone]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights.*layers\.1\.mlp\.up_proj"):
        load_model(replace(settings, model=str(path)), reader=True)


def test_not_a_language_model(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ModelError, match="vit"):
        load_model(replace(settings, model=str(tmp_path)), reader=True)
    with pytest.raises(ModelError, match="is not a model"):
        read_config(str(tmp_path / "nowhere"))


def test_settings_resolve_every_auto() -> None:
    recipe = {"model": {"path": "m"}, "data": {}, "rewards": [{"kind": "exact"}]}
    config = Config.model_validate({**recipe, "adapter": {"rank": 8, "target": ["q_proj"]}})
    cpu = PolicySettings.from_config(config, device="cpu", banned_ids=(1,))
    gpu = PolicySettings.from_config(config, device="cuda")
    assert (cpu.dtype, cpu.gradient_checkpointing, cpu.alpha, cpu.target) == ("float32", False, 16.0, ("q_proj",))
    assert (gpu.dtype, gpu.gradient_checkpointing) == ("bfloat16", True)


def test_patches_are_embedded_as_by_the_convolution(base: Any) -> None:
    embed = base.model.visual.patch_embed
    patches = torch.randn(7, embed.proj.weight[0].numel(), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(embed(patches), type(embed).forward(embed, patches), atol=1e-5, rtol=1e-5)
