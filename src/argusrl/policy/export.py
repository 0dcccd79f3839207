"""Published tensors in the forms that other tools read: a PEFT folder, or a whole model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from argusrl.errors import ModelError
from argusrl.policy.adapter import LORA_FILE, read_tensors
from argusrl.policy.model import load_model, torch_dtype
from argusrl.policy.settings import PolicySettings
from argusrl.storage.publish import publish_folder


def write_peft(settings: PolicySettings, adapter: Path, to: Path) -> None:
    """Copy a published LoRA adapter as a plain PEFT folder. Raises ModelError for full-parameter training."""
    if settings.kind == "full":
        raise ModelError("full-parameter training has no adapter", "export the whole model with --merge")
    with publish_folder(to.absolute()) as temporary:
        for name in (LORA_FILE, "adapter_config.json"):
            shutil.copyfile(adapter / name, temporary / name)


def write_merged(settings: PolicySettings, adapter: Path, to: Path) -> None:
    """Write the base model with the adapter merged in (in float32, then rounded to the model's type once)."""
    model = _merged(settings, adapter).to(torch_dtype(settings.dtype))
    with publish_folder(to.absolute()) as temporary:
        model.save_pretrained(temporary)
        _processor(settings).save_pretrained(temporary)


def _merged(settings: PolicySettings, adapter: Path) -> Any:
    from peft import PeftModel

    model = load_model(replace(settings, dtype="float32"), reader=True)
    if settings.kind == "lora":
        return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in read_tensors(adapter).items():
            parameters[name].copy_(tensor)
    return model


def _processor(settings: PolicySettings) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(settings.model, revision=settings.revision)
