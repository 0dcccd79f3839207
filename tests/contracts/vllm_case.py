"""A real engine with the tiny model as the contract wants it, and the same model in transformers to compare with."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from argusrl.errors import EngineError
from argusrl.rollout.engine import EngineSettings, SampleRequest
from contracts.engine_contract import PIXELS, EngineCase

RANK, ALPHA = 16, 24.0  # a scale that is no power of two must be undone exactly, too
END, BANNED = 2, (0, 1, 3, 4, 5, 6, 7)


def settings(model: str) -> EngineSettings:
    return EngineSettings(
        model=model,
        dtype="float32",
        device="cpu",
        max_tokens=256,
        max_images=2,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        banned_ids=BANNED,
        end_ids=(END,),
        cache_bytes=64 << 20,
        gpu_memory_share=0.5,
        max_sequences=64,
        eager=True,
        tensor_parallel=1,
    )


@contextmanager
def running_vllm(tiny_model: Path, folder: Path, **changes: Any) -> Iterator[EngineCase]:
    """vLLM with the tiny model; closed afterwards."""
    pytest.importorskip("vllm")
    from argusrl.rollout.vllm_engine import VllmEngine

    config = json.loads((tiny_model / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    query, key = (text[f"num_{kind}_heads"] * text["head_dim"] for kind in ("attention", "key_value"))
    sizes = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, key),
        "self_attn.v_proj": (hidden, key),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    chosen = replace(settings(str(tiny_model)), **changes)
    engine = VllmEngine.start(chosen)
    case = EngineCase(
        engine=engine,
        settings=chosen,
        image_start=config["vision_start_token_id"],
        image_pad=config["image_token_id"],
        image_end=config["vision_end_token_id"],
        tokens_per_image=(PIXELS // (vision["patch_size"] * vision["spatial_merge_size"])) ** 2,
        text_ids=range(20, text["vocab_size"] - 50),
        lora_shapes={
            f"model.language_model.layers.{layer}.{name}": size
            for layer in range(text["num_hidden_layers"])
            for name, size in sizes.items()
        },
        folder=folder,
    )
    yield case
    case.run(engine.close())
    with pytest.raises(EngineError, match="closed"):
        case.run(case.sample(case.request()))


class Reference:
    """The same model and adapter (or weights) in transformers and PEFT."""

    def __init__(self, case: EngineCase, version: int | None, weights: dict[str, Any] | None = None) -> None:
        from peft import PeftModel
        from transformers import AutoImageProcessor, AutoModelForImageTextToText

        self._image_pad = case.image_pad
        self._processor = AutoImageProcessor.from_pretrained(case.settings.model)
        model = AutoModelForImageTextToText.from_pretrained(case.settings.model, dtype=torch.float32)
        if version is not None:
            model = PeftModel.from_pretrained(model, str(case.folder / f"v{version:06d}"))
        if weights is not None:
            assert not model.load_state_dict(weights, strict=False).unexpected_keys
        self._model = model.eval()

    def logprobs(
        self, request: SampleRequest, reply: tuple[int, ...], temperature: float, banned: tuple[int, ...]
    ) -> list[float]:
        images = [Image.open(io.BytesIO(image.data or b"")) for image in request.images]
        ids = torch.tensor([request.expanded_ids + reply])
        with torch.no_grad():
            logits = self._model(
                input_ids=ids,
                mm_token_type_ids=(ids == self._image_pad).int(),
                use_cache=False,
                **self._processor(images=images, return_tensors="pt"),
            ).logits[0, len(request.expanded_ids) - 1 : -1]
        logits[:, list(banned)] = -float("inf")
        table = torch.log_softmax(logits / temperature, -1)
        return table[range(len(reply)), list(reply)].tolist()
