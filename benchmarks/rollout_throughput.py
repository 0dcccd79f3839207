"""Sampled tokens per second through argusrl's engine against plain offline vLLM: same prompts, seeds, adapter.

Two processes are started, and take turns round by round, so a busy machine slows both alike. Every round has new
images, so nothing is served from a cache of the round before. Both return a log-probability per sampled token.
Prints one JSON object.

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
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK, ALPHA = 16, 32
PIXELS = 64
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny-qwen3vl")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=48, help="sampled per reply, no earlier end")
    parser.add_argument("--rounds", type=int, default=6, help="measured, after two that are not")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        adapter = write_adapter(Path(options.model), Path(folder))
        pipes, processes = {}, []
        for name in ("argusrl", "plain"):
            pipes[name], other = context.Pipe()
            processes.append(context.Process(target=serve, args=(name, vars(options), adapter, other), daemon=True))
            processes[-1].start()
            pipes[name].recv()
        measured: dict[str, list[tuple[float, float, int]]] = {name: [] for name in pipes}
        for number in range(options.rounds + 2):
            for name in sorted(pipes, reverse=bool(number % 2)):
                pipes[name].send(number)
                result = pipes[name].recv()
                if number >= 2:
                    measured[name].append(result)
        for pipe in pipes.values():
            pipe.send(None)
        for process in processes:
            process.join()
    speeds = {name: [tokens / wall for wall, _, tokens in rounds] for name, rounds in measured.items()}
    ratios = [ours / plain for ours, plain in zip(speeds["argusrl"], speeds["plain"], strict=True)]
    report = {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "tokens_per_second": {name: round(statistics.median(each)) for name, each in speeds.items()},
        "cpu_seconds_per_round": {
            name: round(statistics.median(cpu for _, cpu, _ in rounds), 2) for name, rounds in measured.items()
        },
        "tokens_per_round": options.prompts * options.samples * options.tokens,
        "load_average": round(os.getloadavg()[0], 2),
        "cores": os.cpu_count(),
    }
    print(json.dumps(report))


def serve(name: str, options: dict[str, Any], adapter: dict[str, str], pipe: Any) -> None:
    """One side: start, say so, then a round per number received."""
    os.environ |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
    run = (start_argusrl if name == "argusrl" else start_plain)(options, adapter)
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        prompts = make_prompts(options, number)
        wall, cpu = time.perf_counter(), cpu_seconds()
        tokens = run(prompts)
        pipe.send((time.perf_counter() - wall, cpu_seconds() - cpu, tokens))


def settings_of(options: dict[str, Any]) -> Any:
    from argusrl.rollout.engine import EngineSettings

    return EngineSettings(
        model=options["model"],
        dtype="float32" if options["device"] == "cpu" else "bfloat16",
        device=options["device"],
        max_tokens=512,
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
    )


def start_argusrl(options: dict[str, Any], adapter: dict[str, str]) -> Callable[[list[Any]], int]:
    from argusrl.rollout.engine import EngineImage, SampleRequest
    from argusrl.rollout.vllm_engine import VllmEngine
    from argusrl.types import AdapterRef

    engine = VllmEngine.start(settings_of(options))
    ref = AdapterRef(version=1, epoch=1, path=adapter["folder"], sha256=adapter["sha256"], file_sha256="")
    asyncio.run(engine.load_adapter(ref, Path(adapter["folder"])))

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


def start_plain(options: dict[str, Any], adapter: dict[str, str]) -> Callable[[list[Any]], int]:
    from argusrl.rollout.vllm_engine import engine_arguments, engine_environment

    settings = settings_of(options)
    os.environ |= engine_environment(settings)
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    ours = ("logits_processors", "additional_config", "worker_extension_cls", "enable_sleep_mode")
    llm = LLM(**{key: value for key, value in engine_arguments(settings).items() if key not in ours})
    lora = LoRARequest("plain", 1, adapter["folder"])
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
    image_tokens = (PIXELS // (vision["patch_size"] * vision["spatial_merge_size"])) ** 2
    start, pad, end = config["vision_start_token_id"], config["image_token_id"], config["vision_end_token_id"]
    random = np.random.default_rng(number)
    prompts = []
    for _ in range(options["prompts"]):
        text = random.integers(8, config["text_config"]["vocab_size"] // 2, options["prompt_tokens"]).tolist()
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 255, (PIXELS, PIXELS, 3), dtype=np.uint8)).save(file, "PNG")
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
    write_manifest(folder, {})
    items = ((name, "float32", tuple(one.shape), one.numpy().tobytes()) for name, one in tensors.items())
    return {"folder": str(folder), "sha256": logical_digest(items)}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
