"""Read a model folder or hub id once per node, and name the parts that training needs."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from argusrl.errors import ModelError
from argusrl.policy import attention
from argusrl.policy.settings import PolicySettings

# Models whose attention goes through transformers' interface and needs nothing but causality: their rows are packed.
PACKED_TEXT_MODELS = frozenset({"llama", "qwen2", "qwen3"})
PACKED_MROPE_MODELS = frozenset({"qwen3_vl"})


def torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def read_config(path: str, revision: str | None = None) -> Any:
    """The model's transformers config. Raises ModelError where there is none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{path} is not a model: {_first_line(error)}",
            "give a folder with config.json and *.safetensors, or a hub id you can read (HF_TOKEN, HF_HUB_OFFLINE)",
        ) from error


def load_model(settings: PolicySettings, *, reader: bool) -> Any:
    """The frozen model with its head: real tensors where `reader`, on the meta device elsewhere.

    One reader per group reads the files; `sharding.share_weights` hands them on. Raises ModelError for a folder that
    is not a model, is damaged, or lacks weights.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = read_config(settings.model, settings.revision)
    model_class = _model_class(config, settings.model)
    choices = {"dtype": torch_dtype(settings.dtype), "attn_implementation": "sdpa"}
    if reader:
        try:
            model, report = model_class.from_pretrained(
                settings.model, revision=settings.revision, output_loading_info=True, **choices
            )
        except Exception as error:  # transformers and safetensors raise many kinds for a damaged folder
            raise ModelError(
                f"the weights of {settings.model} cannot be read: {_first_line(error)}", "download the model again"
            ) from error
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])
            raise ModelError(f"{settings.model} lacks {len(missing)} weights, e.g. {', '.join(missing[:3])}")
    else:
        with torch.device("meta"):
            model = model_class.from_config(config, **choices)
    if getattr(text_config(model), "final_logit_softcapping", None):
        raise ModelError(f"{settings.model} caps its logits softly, which the log-probabilities here do not reproduce")
    if packs(config):
        attention.register()
        text_config(model)._attn_implementation = attention.NAME  # the vision tower keeps its own
    if has_mrope(config):
        embed = model.model.visual.patch_embed
        embed.forward = MethodType(_embed_patches, embed)
    model.requires_grad_(False)
    _without_dropout(model)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def decoder_of(model: Any) -> nn.Module:
    """The language model without its head."""
    return model.get_decoder()


def decoder_prefix(model: Any) -> str:
    """Its name inside `model`, e.g. "model.language_model"."""
    decoder = decoder_of(model)
    return next(name for name, module in model.named_modules() if module is decoder)


def head_of(model: Any) -> nn.Module:
    return model.get_output_embeddings()


def text_config(model: Any) -> Any:
    return model.config.get_text_config()


def packs(config: Any) -> bool:
    """Whether several sequences may share a row."""
    text = config.get_text_config()
    windows = "sliding_attention" in (getattr(text, "layer_types", None) or ())
    rope = getattr(text, "rope_parameters", None) or {}
    by_length = rope.get("rope_type") in ("dynamic", "longrope")  # scaled by the longest position of the row
    return config.model_type in PACKED_TEXT_MODELS | PACKED_MROPE_MODELS and not windows and not by_length


def has_mrope(config: Any) -> bool:
    return config.model_type in PACKED_MROPE_MODELS


def takes_images(config: Any) -> bool:
    return getattr(config, "vision_config", None) is not None


def _model_class(config: Any, path: str) -> Any:
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    raise ModelError(
        f"{path} is a {config.model_type}: neither an image-text model nor a causal language model of transformers"
    )


def _embed_patches(embed: Any, patches: Tensor) -> Tensor:
    """[n, H] of [n, values]. A convolution whose kernel is as large as its input is one product, and slower as such."""
    weight = embed.proj.weight
    return nn.functional.linear(patches.to(weight.dtype), weight.flatten(1), embed.proj.bias)


def _without_dropout(model: nn.Module) -> None:
    """The policy that is trained must be the policy that sampled."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
