"""What vLLM is started with, from the engine's settings. Imports nothing heavy."""

from __future__ import annotations

import os
from typing import Any

from argusrl.rollout.engine import EngineSettings

_CPU_BATCH_TOKENS = 4096


def engine_environment(device: str) -> dict[str, str]:
    """Environment variables of the process that holds the engine; set them before vllm is imported there."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the noise needs the generators of the first one's batch
        "VLLM_NO_USAGE_STATS": "1",
        # Its warnings are of what is chosen here on purpose, some of them once per image.
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        # Cores are shared with a rank, so no binding. Compiling the sampler would cost more than it ever gives back.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return environment


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs. `settings.options` has the last word."""
    arguments: dict[str, Any] = {
        "model": settings.model,
        "revision": settings.revision,
        "dtype": settings.dtype,
        "seed": 0,
        "max_model_len": settings.max_tokens,
        "max_num_seqs": settings.max_sequences,
        "enforce_eager": settings.eager,
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_prefix_caching": True,
        "async_scheduling": False,  # the noise must know every token before the next draw
        "logprobs_mode": "processed_logprobs",
        "logits_processors": [
            "argusrl.rollout.sampling_noise:BannedTokens",
            "argusrl.rollout.sampling_noise:PositionKeyedNoise",
        ],
        "additional_config": {"banned_ids": list(settings.banned_ids)},
        "worker_extension_cls": "argusrl.rollout.worker_extension.WorkerExtension",
        "generation_config": "vllm",  # the model folder's own sampling defaults must not slip in
        "limit_mm_per_prompt": {"image": settings.max_images, "video": 0},
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    pixels = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
    if settings.max_images and (pixels := {name: value for name, value in pixels.items() if value is not None}):
        arguments["mm_processor_kwargs"] = pixels
    if settings.lora_rank is not None and not settings.merged:
        # One slot more: requests under the previous version may still run while the next one is loaded and proven.
        slots = settings.live_versions + 1
        arguments |= {"enable_lora": True, "max_lora_rank": settings.lora_rank, "max_loras": slots, "max_cpu_loras": 4}
        arguments["lora_target_modules"] = list(settings.lora_targets) or None
    if settings.cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = settings.cache_bytes
    if settings.device == "cpu":
        arguments |= {
            "block_size": 32,  # the smallest the CPU attention takes: short prompts share a prefix
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_CPU_BATCH_TOKENS, settings.max_tokens),
        }
    else:
        arguments |= {"enable_sleep_mode": True, "gpu_memory_utilization": settings.gpu_memory_share}
    return arguments | settings.options
