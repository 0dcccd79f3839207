"""Does packing change what the model computes? `argusrl doctor` asks before it can matter. No hub, no process group."""

from __future__ import annotations

import io
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from argusrl.errors import ModelError
from argusrl.policy.inputs import InputBuilder
from argusrl.policy.model import has_mrope, load_model, text_config
from argusrl.policy.rows import Row, RowTurn
from argusrl.policy.scorer import Scorer
from argusrl.policy.settings import PolicySettings

LOGIT_LIMIT = 1e-5
_WORDS = tuple(
    f"<|{name}|>"
    for name in ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
)


def packing_parity(model_path: str | None = None) -> dict[str, Any]:
    """Logits of packed rows against each row alone, the plain way transformers computes it, in float32 on the CPU.

    Without `model_path` a tiny random Qwen3-VL is made for it. The answer holds `max_logit_error`, `limit`,
    `passed`, `rows` and `tokens`. Raises ModelError for a model other than Qwen3-VL.
    """
    if model_path is not None:
        return _compare(model_path)
    with tempfile.TemporaryDirectory(prefix="argusrl-selftest-") as folder:
        make_random_model(Path(folder))
        return _compare(folder)


def make_random_model(folder: Path, *, seed: int = 0, hidden: int = 32, layers: int = 2) -> Path:
    """Write a tiny random Qwen3-VL with processor: DeepStack runs and images give different numbers of tokens."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 96,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
            "pad_token_id": 0,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": hidden,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],  # below the depth, or DeepStack never runs
        },
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=3,
        vision_end_token_id=4,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config).float()
        for parameter in model.parameters():  # far from the tiny default scale, so that mistakes show in the logits
            torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    _processor().save_pretrained(folder)
    return folder


def _processor() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    vocabulary = {word: number for number, word in enumerate((*_WORDS, *(f"w{i}" for i in range(96 - len(_WORDS)))))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[word for word in _WORDS if word not in ("<|im_end|>", "<|endoftext|>")],
    )
    pixels = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size, **pixels),
        video_processor=Qwen3VLVideoProcessor(**pixels),
        tokenizer=tokenizer,
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )


def sample_rows(builder: InputBuilder, config: Any) -> list[Row]:
    """One row with an image, one text-only, one of two turns with an image each (the first image again)."""
    vocabulary = config.get_text_config().vocab_size
    small, wide = _image(64, 64, 40), _image(128, 64, 200)
    first = builder.image_tokens(small)
    second = builder.image_tokens(wide)
    start, pad, end = config.vision_start_token_id, config.image_token_id, config.vision_end_token_id

    def turn(images: tuple[int, ...], text: int, reply: int) -> RowTurn:
        shown = tuple(token for count in images for token in (start, *(pad,) * count, end))
        words = tuple(7 + (text * 31 + i * 17) % (vocabulary - 8) for i in range(text))
        answer = tuple(7 + (reply * 13 + i * 29) % (vocabulary - 8) for i in range(reply))
        return RowTurn(prompt_ids=shown + words, response_ids=answer, logprobs=(-1.0,) * reply)

    return [
        Row(turns=(turn((first,), 5, 6),), advantage=1.0, images=(small,)),
        Row(turns=(turn((), 9, 4),), advantage=-0.5),
        Row(turns=(turn((second,), 3, 5), turn((first,), 4, 3)), advantage=0.25, images=(wide, small)),
    ]


def _compare(path: str) -> dict[str, Any]:
    settings = PolicySettings(model=path, device="cpu", dtype="float32")
    base = load_model(settings, reader=True)
    if not has_mrope(base.config):
        raise ModelError(f"{path} is a {base.config.model_type}: the self-test is for Qwen3-VL")
    builder = InputBuilder(base, settings)
    rows = sample_rows(builder, base.config)
    rows.append(_other_sample(rows[-1]))
    head = base.get_output_embeddings()
    with torch.no_grad():
        batch = builder.pack(rows)
        packed = head(Scorer(base, base).hidden_states(batch)[batch.sources])
        text_config(base)._attn_implementation = "sdpa"
        alone = torch.cat([_plain_logits(base, builder, row) for row in rows])
    error = (packed - alone).abs().max().item()
    return {
        "max_logit_error": error,
        "limit": LOGIT_LIMIT,
        "passed": error < LOGIT_LIMIT,
        "rows": len(rows),
        "tokens": batch.input_ids.shape[1],
    }


def _other_sample(row: Row) -> Row:
    """Another trajectory of the same prompt, which shares its tokens when packed."""
    first = replace(row.turns[0], response_ids=row.turns[0].response_ids[::-1][:2], logprobs=(-1.0, -1.0))
    return replace(row, turns=(first, *row.turns[1:]))


def _plain_logits(base: Any, builder: InputBuilder, row: Row) -> Tensor:
    """[N, V] as transformers does it by itself: its own positions, an ordinary attention mask."""
    batch = builder.pack([row])
    inputs = dict(batch.image_inputs)
    if row.images:
        grids, pixels = inputs["image_grid_thw"], inputs["pixel_values"]
        pieces = pixels.split(grids.prod(-1).tolist())
        inputs["pixel_values"] = torch.cat([pieces[number] for number in batch.image_order])
        inputs["image_grid_thw"] = grids[list(batch.image_order)]
        inputs["mm_token_type_ids"] = batch.token_types
    attention = torch.ones_like(batch.input_ids)
    logits = base(input_ids=batch.input_ids, attention_mask=attention, use_cache=False, **inputs).logits[0]
    return logits[batch.sources]


def _image(width: int, height: int, tone: int) -> bytes:
    from PIL import Image

    image = Image.new("RGB", (width, height), (tone, 90, 255 - tone))
    image.paste((255, tone, 0), (width // 4, height // 4, width // 2, height // 2))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
