"""Sizes of the published Qwen3-VL models, for plans on a machine that has no copy of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_VOCABULARY = 151_936
_HEAD_WIDTH = 128
_KV_HEADS = 8
_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": (5, 11, 17)}
_LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": (8, 16, 24)}

# size: hidden, layers, heads, feed-forward, tied, tower
_QWEN3_VL: dict[str, tuple[int, int, int, int, bool, dict[str, Any]]] = {
    "2B": (2048, 28, 16, 6144, True, _SMALL_TOWER),
    "4B": (2560, 36, 32, 9728, True, _SMALL_TOWER),
    "8B": (4096, 36, 32, 12_288, False, _LARGE_TOWER),
    "32B": (5120, 64, 64, 25_600, False, _LARGE_TOWER),
}

KNOWN_MODELS: Sequence[str] = [f"Qwen3-VL-{size}-{kind}" for size in _QWEN3_VL for kind in ("Instruct", "Thinking")]
"""Last parts of paths and hub ids whose config.json is not needed."""


def known_config(path: str) -> dict[str, Any] | None:
    """What config.json of the model that `path` (a folder or hub id) ends with says of its size; None: not known."""
    name = path.rstrip("/").rpartition("/")[2]
    if name not in KNOWN_MODELS:
        return None
    hidden, layers, heads, feed_forward, tied, tower = _QWEN3_VL[name.split("-")[2]]
    text = {
        "vocab_size": _VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_WIDTH,
    }
    vision = {
        **tower,
        "num_heads": 16,
        "out_hidden_size": hidden,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
    }
    return {
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "tie_word_embeddings": tied,
        "text_config": text,
        "vision_config": vision,
    }
