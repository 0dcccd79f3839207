"""The LoRA adapter: which layers it sits on, how it begins, and what its tensors are called in a PEFT folder."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from argusrl.errors import ModelError
from argusrl.policy.model import decoder_of, decoder_prefix, load_model
from argusrl.policy.settings import PolicySettings

ADAPTER = "default"  # PEFT's name for the only adapter
_UNSUPPORTED = ("modules_to_save", "use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "layer_replication")


def add_lora(model: Any, settings: PolicySettings) -> Any:
    """Wrap the language model's linear layers; returns the PeftModel with an adapter that changes nothing.

    Initial values depend on the seed and the tensor's name alone: not on the number of ranks, not on the order of
    layers. Raises ModelError for target names that are no linear layers of the language model.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    names = _target_names(model, settings)
    pattern = rf"{re.escape(decoder_prefix(model))}\..*\.({'|'.join(names)})"  # vLLM reads the names in the last group
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=_whole(settings.alpha),
        target_modules=pattern,
        lora_dropout=0.0,
        bias="none",
        base_model_name_or_path=settings.model,
    )
    wrapped = get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad and not parameter.is_meta:
            _initialise(name, parameter, settings.seed)
    for layer in wrapped.modules():
        if isinstance(layer, LoraLayer):
            layer.forward = MethodType(_adapted, layer)
    return wrapped


def _adapted(layer: Any, inputs: Tensor) -> Tensor:
    """A LoRA layer's output, scaled and added in one product.

    PEFT's own forward writes the whole output twice more, forward and backward: about 7 % of an update.
    """
    base: Tensor = layer.base_layer(inputs)
    down, up = (part[ADAPTER].weight.to(base.dtype) for part in (layer.lora_A, layer.lora_B))
    inner = torch.nn.functional.linear(inputs, down).flatten(0, -2)
    return torch.addmm(base.flatten(0, -2), inner, up.t(), alpha=layer.scaling[ADAPTER]).view_as(base)


def load_initial(wrapped: nn.Module, folder: Path, settings: PolicySettings) -> None:
    """Take the values of a PEFT folder. Raises ModelError, listing everything that does not fit."""
    config, tensors = _read_peft_folder(folder)
    problems = _config_problems(config, settings)
    expected = {peft_name(name): p for name, p in wrapped.named_parameters() if p.requires_grad}
    missing, foreign = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    problems += [f"it lacks {name}" for name in missing[:3]]
    problems += [f"it adapts {name}, which is not a target here" for name in foreign[:3]]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, not {tuple(p.shape)}"
        for name, p in expected.items()
        if name in tensors and tensors[name].shape != p.shape
    ][:3]
    if problems:
        raise ModelError(
            f"the adapter {folder} cannot be the start:\n" + "\n".join(f"- {problem}" for problem in problems),
            "use a plain LoRA adapter of this model, and its rank, alpha and targets in the adapter section",
        )
    with torch.no_grad():
        for name, parameter in expected.items():
            if not parameter.is_meta:
                parameter.copy_(tensors[name])


def peft_name(parameter: str) -> str:
    """Name in a PEFT file of a parameter of the PeftModel: without the adapter's own name."""
    return parameter.replace(f".{ADAPTER}.", ".")


@contextmanager
def without_adapter(wrapped: nn.Module) -> Iterator[None]:
    """The base model. The scale is set to zero, since PEFT's own switch also flips requires_grad, which FSDP reads."""
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [module for module in wrapped.modules() if isinstance(module, LoraLayer)]
    scales = [layer.scaling[ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scaling[ADAPTER] = scale


def adapted_layers(settings: PolicySettings) -> tuple[str, ...]:
    """Last name parts of the layers that an adapter of this model sits on, without reading a weight of the model.

    Raises ModelError for target names that are no linear layers of the language model, and for an initial adapter
    that cannot be the start.
    """
    model = load_model(settings, reader=False)
    names = tuple(_target_names(model, settings))
    if settings.initial is not None:
        load_initial(add_lora(model, settings), settings.initial, settings)
    return names


def _target_names(model: Any, settings: PolicySettings) -> list[str]:
    modules = decoder_of(model).named_modules()
    linear = {name.rsplit(".", 1)[-1] for name, module in modules if isinstance(module, nn.Linear)}
    if settings.target == "language":
        return sorted(linear)
    unknown = [name for name in settings.target if name not in linear]
    if unknown:
        raise ModelError(
            f"adapter.target names no linear layer of the language model: {', '.join(unknown)}",
            f"it has {', '.join(sorted(linear))}",
        )
    return sorted(set(settings.target))


def _initialise(name: str, parameter: Tensor, seed: int) -> None:
    """A uniform within ±1/sqrt(inputs), as a linear layer begins; B zero, so that the product is."""
    with torch.no_grad():
        if "lora_B" in name:
            parameter.zero_()
            return
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        bound = 1.0 / math.sqrt(parameter.shape[1])
        parameter.copy_((torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound)


def _read_peft_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        return config, load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"{folder} is not a PEFT adapter: {error}", "it needs adapter_config.json and adapter_model.safetensors"
        ) from error


def _config_problems(config: dict[str, Any], settings: PolicySettings) -> list[str]:
    problems = []
    if config.get("peft_type") != "LORA":
        problems.append(f"it is of type {config.get('peft_type')}, not LORA")
    if config.get("r") != settings.rank:
        problems.append(f"its rank is {config.get('r')}, adapter.rank is {settings.rank}")
    if config.get("lora_alpha") != settings.alpha:
        problems.append(f"its alpha is {config.get('lora_alpha')}, adapter.alpha is {settings.alpha:g}")
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(("pissa", "olora", "corda", "loftq", "eva")):
        problems.append(f"it began as {start}, which changed the base weights, too")
    problems += [f"it uses {key}" for key in _UNSUPPORTED if config.get(key)]
    if config.get("bias", "none") != "none":
        problems.append(f"it trains biases ({config['bias']})")
    return problems


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
