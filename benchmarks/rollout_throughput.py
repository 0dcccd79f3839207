"""Sampled tokens per second through argusrl's engine against plain offline vLLM: same prompts, seeds, weights.

Each is measured with the adapter in LoRA kernels and with the adapter merged into the weights. A process per side is
started, and they take turns round by round, so a busy machine slows all alike. Every round has new images, so nothing
is served from a cache of the round before. All return a log-probability per sampled token. Prints one JSON object.

    python benchmarks/rollout_throughput.py [--model models/tiny-qwen3vl] [--prompts 32] [--samples 8] ...
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RANK, ALPHA = 16, 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIDES = ("argusrl_lora", "plain_lora", "argusrl_merged", "plain_merged")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny-qwen3vl")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=48, help="sampled per reply, no earlier end")
    parser.add_argument("--pixels", type=int, default=64, help="sides of the square image of each prompt")
    parser.add_argument("--rounds", type=int, default=6, help="measured, after two that are not")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    print(json.dumps(measure(**vars(parser.parse_args()))))


def measure(
    model: str = "models/tiny-qwen3vl",
    prompts: int = 32,
    samples: int = 8,
    prompt_tokens: int = 48,
    tokens: int = 48,
    pixels: int = 64,
    rounds: int = 6,
    device: str = "cpu",
    sides: Sequence[str] = SIDES,
) -> dict[str, Any]:
    """Ratios of tokens per second, medians over the rounds, with what they come from.

    `rollout_vs_vllm_lora`, `rollout_vs_vllm_merged`: argusrl over plain vLLM, served the same way;
    `rollout_vs_vllm`: the lower of the two; `merged_vs_lora_decode`: argusrl merged over argusrl with LoRA kernels.
    """
    options = {
        "model": model,
        "prompts": prompts,
        "samples": samples,
        "prompt_tokens": prompt_tokens,
        "tokens": tokens,
        "pixels": pixels,
        "device": device,
    }
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        adapter = write_adapter(Path(model), Path(folder))
        pipes, processes = {}, []
        for side in sides:
            pipes[side], other = context.Pipe()
            processes.append(context.Process(target=serve, args=(side, options, adapter, other), daemon=True))
            processes[-1].start()
            pipes[side].recv()
        measured: dict[str, list[tuple[float, float, int]]] = {side: [] for side in sides}
        for number in range(rounds + 2):
            for side in sides if number % 2 else reversed(sides):
                pipes[side].send(number)
                result = pipes[side].recv()
                if number >= 2:
                    measured[side].append(result)
        for pipe in pipes.values():
            pipe.send(None)
        for process in processes:
            process.join()
    return report(measured, tokens_per_round=prompts * samples * tokens)


def report(measured: dict[str, list[tuple[float, float, int]]], tokens_per_round: int) -> dict[str, Any]:
    """`measured`: (wall seconds, CPU seconds, tokens) of each round by side."""
    pairs = {
        "rollout_vs_vllm_lora": ("argusrl_lora", "plain_lora"),
        "rollout_vs_vllm_merged": ("argusrl_merged", "plain_merged"),
        "merged_vs_lora_decode": ("argusrl_merged", "argusrl_lora"),
    }
    found: dict[str, Any] = {}
    spread: dict[str, Any] = {}
    for what, column in (("", 0), ("_cpu", 1)):
        speeds = {side: [one[2] / one[column] for one in rounds] for side, rounds in measured.items()}
        for name, (one, other) in pairs.items():
            if one in speeds and other in speeds:
                ratios = [a / b for a, b in zip(speeds[one], speeds[other], strict=True)]
                found[name + what] = round(statistics.median(ratios), 3)
                spread[name + what] = [round(ratio, 3) for ratio in ratios]
    ours = [found[name] for name in ("rollout_vs_vllm_lora", "rollout_vs_vllm_merged") if name in found]
    if ours:
        found["rollout_vs_vllm"] = min(ours)
    return {
        **found,
        "ratios": spread,
        "tokens_per_second": {
            side: round(statistics.median(one[2] / one[0] for one in rounds)) for side, rounds in measured.items()
        },
        "cpu_seconds_per_round": {
            side: round(statistics.median(one[1] for one in rounds), 2) for side, rounds in measured.items()
        },
        "tokens_per_round": tokens_per_round,
        "load_average": round(os.getloadavg()[0], 2),
        "cores": os.cpu_count(),
    }


def serve(side: str, options: dict[str, Any], adapter: dict[str, str], pipe: Any) -> None:
    """One side: start, say so, then a round per number received."""
    os.environ |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
    who, _, how = side.partition("_")
    run = (start_argusrl if who == "argusrl" else start_plain)(options, adapter, how == "merged")
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        prompts = make_prompts(options, number)
        wall, cpu = time.perf_counter(), cpu_seconds()
        tokens = run(prompts)
        pipe.send((time.perf_counter() - wall, cpu_seconds() - cpu, tokens))


def settings_of(options: dict[str, Any], merged: bool) -> Any:
    from argusrl.rollout.engine import EngineSettings

    return EngineSettings(
        model=options["model"],
        dtype="float32" if options["device"] == "cpu" else "bfloat16",
        device=options["device"],
        max_tokens=2048,
        max_images=1,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        banned_ids=tuple(range(8)),
        end_ids=(),
        cache_bytes=128 << 20,
        gpu_memory_share=0.4,
        max_sequences=128,
        eager=options["device"] == "cpu",
        tensor_parallel=1,
        lora_targets=TARGETS,
        merged=merged,
    )


def start_argusrl(options: dict[str, Any], adapter: dict[str, str], merged: bool) -> Callable[[list[Any]], int]:
    from argusrl.rollout.engine import EngineImage, SampleRequest
    from argusrl.rollout.vllm_engine import VllmEngine
    from argusrl.storage.adapter_folder import read_adapter
    from argusrl.types import AdapterRef

    engine = VllmEngine.start(settings_of(options, merged))
    ref = AdapterRef(version=1, epoch=1, path=adapter["folder"], sha256=adapter["sha256"], file_sha256="")
    asyncio.run(engine.load_adapter(ref, read_adapter(Path(adapter["folder"]))))

    async def count(request: SampleRequest) -> int:
        return sum([len(span.logprobs) async for span in engine.sample(request)])

    async def sample(prompts: list[Any]) -> int:
        requests = [
            SampleRequest(
                id=str(number),
                collapsed_ids=prompt["collapsed"],
                expanded_ids=prompt["expanded"],
                images=(EngineImage(sha256=hashlib.sha256(prompt["png"]).hexdigest(), data=prompt["png"]),),
                seeds=tuple(range(options["samples"])),
                temperature=1.0,
                max_tokens=options["tokens"],
                adapter_version=1,
            )
            for number, prompt in enumerate(prompts)
        ]
        return sum(await asyncio.gather(*(count(request) for request in requests)))

    return lambda prompts: asyncio.run(sample(prompts))


def start_plain(options: dict[str, Any], adapter: dict[str, str], merged: bool) -> Callable[[list[Any]], int]:
    from argusrl.rollout.vllm_engine import engine_arguments, engine_environment

    settings = settings_of(options | ({"model": adapter["merged_model"]} if merged else {}), merged)
    os.environ |= engine_environment(settings.device)
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    ours = ("logits_processors", "additional_config", "worker_extension_cls", "enable_sleep_mode")
    llm = LLM(**{key: value for key, value in engine_arguments(settings).items() if key not in ours})
    lora = None if merged else LoRARequest("plain", 1, adapter["folder"])
    if lora is not None:
        llm.llm_engine.add_lora(lora)

    def sample(prompts: list[Any]) -> int:
        inputs = [
            {
                "prompt_token_ids": list(prompt["collapsed"]),
                "multi_modal_data": {"image": [Image.open(io.BytesIO(prompt["png"]))]},
            }
            for prompt in prompts
        ]
        parameters = SamplingParams(
            n=options["samples"],
            seed=0,
            temperature=1.0,
            max_tokens=options["tokens"],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        outputs = llm.generate(inputs, parameters, lora_request=lora, use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)

    return sample


def make_prompts(options: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Random text around one random image each; the same for both sides in a round."""
    import numpy as np
    from PIL import Image

    config = json.loads(Path(options["model"], "config.json").read_text())
    vision = config["vision_config"]
    pixels = options["pixels"]
    image_tokens = (pixels // (vision["patch_size"] * vision["spatial_merge_size"])) ** 2
    start, pad, end = config["vision_start_token_id"], config["image_token_id"], config["vision_end_token_id"]
    random = np.random.default_rng(number)
    prompts = []
    for _ in range(options["prompts"]):
        text = random.integers(8, config["text_config"]["vocab_size"] // 2, options["prompt_tokens"]).tolist()
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 255, (pixels, pixels, 3), dtype=np.uint8)).save(file, "PNG")
        collapsed, expanded = [start, pad, end], [start, *[pad] * image_tokens, end]
        prompts.append({"collapsed": (*collapsed, *text), "expanded": (*expanded, *text), "png": file.getvalue()})
    return prompts


def write_adapter(model: Path, folder: Path) -> dict[str, str]:
    """A random LoRA adapter on the language model's linear layers, published as a run does."""
    import torch
    from safetensors.torch import save_file

    from argusrl.storage.digests import logical_digest
    from argusrl.storage.manifest import write_manifest

    text = json.loads((model / "config.json").read_text())["text_config"]
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    query = text["num_attention_heads"] * text["head_dim"]
    key = text["num_key_value_heads"] * text["head_dim"]
    sizes = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, key),
        "self_attn.v_proj": (hidden, key),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    tensors = {}
    for layer in range(text["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.language_model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, inputs) * 0.02
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, RANK) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_manifest(folder, {"file": "adapter_model.safetensors"})
    items = ((name, "float32", tuple(one.shape), one.numpy().tobytes()) for name, one in tensors.items())
    merged = write_merged(model, tensors, folder / "merged")
    return {"folder": str(folder), "sha256": logical_digest(items), "merged_model": str(merged)}


def write_merged(model: Path, adapter: dict[str, Any], folder: Path) -> Path:
    """The same model with the adapter in its weights, for plain vLLM."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights: dict[str, Any] = {}
    for file in sorted(model.glob("*.safetensors")):
        weights |= load_file(file)
    for name, a in adapter.items():
        if name.endswith(".lora_A.weight"):
            b = adapter[name.replace("lora_A", "lora_B")]
            part = name.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[part] = weights[part].float() + ALPHA / RANK * b @ a
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
