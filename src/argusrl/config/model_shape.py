"""What a model's config.json says about its size: parameters, bytes of KV cache, floating-point work. No weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from argusrl.config.known_models import known_config
from argusrl.errors import ModelError

_TEXT_MODELS = ("llama", "qwen2", "qwen3")
_VISION_MODELS = ("qwen3_vl",)
_STORED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class VisionShape:
    """A vision tower with DeepStack."""

    depth: int
    hidden: int
    feed_forward: int
    heads: int
    outputs: int  # the decoder's hidden size
    positions: int  # learned ones
    patch_values: int  # numbers in one patch of pixels
    patch_pixels: int  # side of a patch
    merge: int  # side of the square of patches that becomes one token
    deepstack: int  # layers of the decoder that get features of their own

    @property
    def block_parameters(self) -> int:
        attention = 4 * self.hidden * self.hidden + 4 * self.hidden
        feed_forward = 2 * self.hidden * self.feed_forward + self.feed_forward + self.hidden
        return attention + feed_forward + 4 * self.hidden

    @property
    def parameters(self) -> int:
        """Blocks, patch embedding, positions, and the mergers behind the last block and the DeepStack ones."""
        merged = self.merge**2 * self.hidden
        merger = merged * merged + merged + merged * self.outputs + self.outputs
        embedding = (self.patch_values + 1) * self.hidden + self.positions * self.hidden
        norms = 2 * self.hidden + self.deepstack * 2 * merged
        return self.depth * self.block_parameters + embedding + (1 + self.deepstack) * merger + norms

    def patches(self, pixels: int) -> int:
        """Of an image with so many pixels after scaling."""
        return pixels // self.patch_pixels**2

    def tokens(self, patches: int) -> int:
        return patches // self.merge**2


@dataclass(frozen=True)
class ModelShape:
    """A decoder with its head, and the vision tower before it if it has one. Counts are of parameters."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    tied: bool  # the head is the embedding
    normed_heads: bool  # a norm over each head's query and key
    biased: tuple[str, ...]  # linear layers with a bias
    stored_element_bytes: int  # of a weight in the checkpoint, whatever is computed with
    vision: VisionShape | None

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Of a model folder. Raises ModelError where config.json is missing or describes another kind of model."""
        try:
            return cls.from_json(json.loads((folder / "config.json").read_text()))
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder} has no config.json that can be read: {error}") from error

    @classmethod
    def find(cls, path: str, revision: str | None = None) -> ModelShape:
        """Of a model folder, of a hub id whose config.json is in the local cache, or of a model of a known name.

        Raises ModelError.
        """
        if Path(path).is_dir():
            return cls.read(Path(path))
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(path, "config.json", revision=revision)
        except HFValidationError:
            cached = None
        if not isinstance(cached, str) and (known := known_config(path)):
            return cls.from_json(known)
        if not isinstance(cached, str):
            raise ModelError(
                f"{path} is no folder here, and its config.json is not in the cache of the hub",
                f"hf download {path} config.json, or say where a copy lies: --model-config PATH",
            )
        return cls.read(Path(cached).parent)

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> ModelShape:
        """Of the content of a config.json. Raises ModelError for a kind of model whose shape is not known here."""
        if not isinstance(config, Mapping):
            raise ModelError(f"config.json holds a {type(config).__name__}, not the settings of a model")
        kind = config.get("model_type")
        if kind not in _TEXT_MODELS + _VISION_MODELS:
            known = ", ".join(_TEXT_MODELS + _VISION_MODELS)
            raise ModelError(f"nothing is known of the size of a {kind}", f"estimates exist for {known}")
        text = config.get("text_config", config)
        try:
            shape = cls._of(kind, text, config)
        except KeyError as error:
            raise ModelError(f"config.json of the {kind} lacks {error}") from error
        except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(f"config.json of the {kind} is damaged: {error}") from error
        if bad := _no_sizes(shape) + (_no_sizes(shape.vision) if shape.vision else []):
            raise ModelError(f"config.json of the {kind} describes no model: {', '.join(bad)}")
        return shape

    @classmethod
    def _of(cls, kind: str, text: Mapping[str, Any], whole: Mapping[str, Any]) -> ModelShape:
        heads = text["num_attention_heads"]
        attention = ("q_proj", "k_proj", "v_proj")
        biased: tuple[str, ...] = attention if kind == "qwen2" else ()
        if text.get("attention_bias"):
            biased = (*attention, "o_proj")
        if text.get("mlp_bias"):
            biased += ("gate_proj", "up_proj", "down_proj")
        return cls(
            layers=text["num_hidden_layers"],
            hidden=text["hidden_size"],
            feed_forward=text["intermediate_size"],
            heads=heads,
            kv_heads=text.get("num_key_value_heads") or heads,
            head_width=text.get("head_dim") or text["hidden_size"] // heads,
            vocabulary=text["vocab_size"],
            tied=bool(whole.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            normed_heads=kind in ("qwen3", "qwen3_vl"),
            biased=biased,
            stored_element_bytes=_STORED_BYTES.get(_dtype(whole) or _dtype(text) or "float32", 2),
            vision=_vision(whole["vision_config"]) if kind in _VISION_MODELS else None,
        )

    @cached_property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the linear layers of one decoder layer."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.feed_forward),
            "up_proj": (self.hidden, self.feed_forward),
            "down_proj": (self.feed_forward, self.hidden),
        }

    @property
    def layer_weights(self) -> int:
        """Matrix elements of one decoder layer, what a token is multiplied with."""
        return sum(inputs * outputs for inputs, outputs in self.linear_layers.values())

    @property
    def layer_parameters(self) -> int:
        biases = sum(outputs for name, (_, outputs) in self.linear_layers.items() if name in self.biased)
        norms = 2 * self.hidden + (2 * self.head_width if self.normed_heads else 0)
        return self.layer_weights + biases + norms

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def decoder_parameters(self) -> int:
        """Layers, embedding, last norm and head."""
        ends = self.head_parameters * (1 if self.tied else 2) + self.hidden
        return self.layers * self.layer_parameters + ends

    @property
    def parameters(self) -> int:
        return self.decoder_parameters + (self.vision.parameters if self.vision else 0)

    @property
    def root_parameters(self) -> int:
        """What belongs to neither a decoder layer nor a vision block: embedding, head, last norm, mergers, …"""
        blocks = self.vision.depth * self.vision.block_parameters if self.vision else 0
        return self.parameters - self.layers * self.layer_parameters - blocks

    def lora_layer_parameters(self, rank: int, target: Literal["language"] | Sequence[str] = "language") -> int:
        """Of the adapter on one decoder layer."""
        names = self.linear_layers if target == "language" else target
        return rank * sum(sum(self.linear_layers[name]) for name in names if name in self.linear_layers)

    def lora_parameters(self, rank: int, target: Literal["language"] | Sequence[str] = "language") -> int:
        return self.layers * self.lora_layer_parameters(rank, target)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Of the engine's cache."""
        return 2 * self.layers * self.kv_heads * self.head_width * element_bytes

    def training_flops(self, tokens: int, predicted_tokens: int) -> int:
        """Of forward and backward through a frozen base: 4 per matrix element and token.

        The head counts for predicted tokens alone. Attention's own products, the tower, the adapter and what gradient
        checkpointing computes a second time are not counted.
        """
        return 4 * (self.layers * self.layer_weights * tokens + self.head_parameters * predicted_tokens)


def _no_sizes(shape: ModelShape | VisionShape) -> list[str]:
    """What has to be a number of something and is not."""
    sizes = {item.name: getattr(shape, item.name) for item in fields(shape) if item.type == "int"}
    return [
        f"{name} {size!r}"
        for name, size in sizes.items()
        if type(size) is not int or size < (0 if name == "deepstack" else 1)
    ]


def _vision(config: Mapping[str, Any]) -> VisionShape:
    side = config["patch_size"]
    return VisionShape(
        depth=config["depth"],
        hidden=config["hidden_size"],
        feed_forward=config["intermediate_size"],
        heads=config["num_heads"],
        outputs=config["out_hidden_size"],
        positions=config["num_position_embeddings"],
        patch_values=config.get("in_channels", 3) * config.get("temporal_patch_size", 2) * side**2,
        patch_pixels=side,
        merge=config.get("spatial_merge_size", 2),
        deepstack=len(config["deepstack_visual_indexes"]),
    )


def _dtype(config: Mapping[str, Any]) -> str | None:
    """Of the weights in the checkpoint; older files call it torch_dtype."""
    return config.get("dtype") or config.get("torch_dtype")
