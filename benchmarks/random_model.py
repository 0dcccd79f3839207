"""A Qwen3-VL with random weights for benchmarks: whole replies always, and images that keep their size.

    python benchmarks/random_model.py FOLDER [--size medium]

Its end token has no probability to speak of, so every reply is as long as its limit. Its patches have 14 pixels, two by
two become a token: images of 112, 336 and 504 pixels a side are not rescaled and have 16, 144 and 324 tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATCH, MERGE = 14, 2
PIXELS_PER_TOKEN = (PATCH * MERGE) ** 2
MOST_IMAGE_TOKENS = 1024
END = "<|never sampled|>"


SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # text and vision
    "small": (
        {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        {"depth": 3, "hidden_size": 96, "intermediate_size": 192, "num_heads": 4},
    ),
    "medium": (
        {
            "hidden_size": 640,
            "intermediate_size": 1792,
            "num_hidden_layers": 14,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "head_dim": 64,
        },
        {"depth": 6, "hidden_size": 192, "intermediate_size": 512, "num_heads": 4},
    ),
}
"""small: 1.8 M parameters, 4 text layers, 3 vision layers; medium: about 70 M. DeepStack from two layers."""


def make_model(folder: Path, seed: int = 0, size: str = "small") -> None:
    """Write model, tokenizer and processors of one of SIZES."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import torch
    from tiny_qwen3vl import CHAT_TEMPLATE, build_tokenizer
    from transformers import (
        Qwen2VLImageProcessor,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"eos_token": END})
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(_config(tokenizer, *SIZES[size])).float()
    with torch.no_grad():
        _keep_from_ending(model, tokenizer.eos_token_id)
    model.save_pretrained(folder)
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=PATCH,
            merge_size=MERGE,
            temporal_patch_size=2,
            size={"shortest_edge": PIXELS_PER_TOKEN, "longest_edge": MOST_IMAGE_TOKENS * PIXELS_PER_TOKEN},
        ),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(patch_size=PATCH, merge_size=MERGE),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


def _keep_from_ending(model: Any, end: int) -> None:
    """One feature of text is a positive constant, which no layer writes to; the end token alone has it negative."""
    embedding = model.get_input_embeddings().weight
    embedding[:, 0] = 0.1
    embedding[end, 0] = -8.0
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0


def _config(tokenizer: Any, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    from transformers import Qwen3VLConfig

    def number(token: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(token))

    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            **text,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": _sections(text["head_dim"]),
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "eos_token_id": number(END),
            "pad_token_id": number("<|endoftext|>"),
        },
        vision_config={
            **vision,
            "out_hidden_size": text["hidden_size"],
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def _sections(head_dim: int) -> list[int]:
    """Of the rotary angles: time, height and width."""
    side = head_dim // 2 * 5 // 16
    return [head_dim // 2 - 2 * side, side, side]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    options = parser.parse_args()
    make_model(options.folder, size=options.size)


if __name__ == "__main__":
    main()
