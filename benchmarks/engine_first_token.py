"""Seconds from process start to the first token of a bare vLLM engine in a Ray actor: the yardstick of our start-up.

Nothing of argusrl is in it: Ray is started, one actor with one CPU makes a plain in-process vLLM engine on the
tiny model and samples one token. Prints one JSON object.

    python benchmarks/engine_first_token.py [--model models/tiny-qwen3vl]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import time
from typing import Any

import psutil

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class BareEngine:
    """A plain vLLM engine as its documentation would have it."""

    def first_token(self, model: str) -> dict[str, float]:
        """Seconds of importing vllm, starting the engine and sampling one token."""
        marks = [time.time()]
        from vllm import LLM, SamplingParams

        marks.append(time.time())
        llm = LLM(
            model,
            dtype="float32",
            max_model_len=256,
            enforce_eager=True,
            kv_cache_memory_bytes=128 << 20,
            limit_mm_per_prompt={"image": 1, "video": 0},
        )
        marks.append(time.time())
        llm.generate([{"prompt_token_ids": [10, 11, 12]}], SamplingParams(max_tokens=1), use_tqdm=False)
        marks.append(time.time())
        names = ("import_seconds", "engine_seconds", "token_seconds")
        return dict(zip(names, (later - one for one, later in itertools.pairwise(marks)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny-qwen3vl")
    options = parser.parse_args()
    started = psutil.Process().create_time()
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": ENVIRONMENT})
    ray_seconds = time.time() - started
    actor: Any = ray.remote(num_cpus=1)(BareEngine).remote()
    parts: dict[str, float] = ray.get(actor.first_token.remote(os.path.abspath(options.model)), timeout=600)
    report = {"first_token_seconds": time.time() - started, "ray_seconds": ray_seconds, **parts}
    ray.shutdown()
    report |= {"load_average": os.getloadavg()[0]}
    print(json.dumps({name: round(value, 2) for name, value in report.items()} | {"cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
