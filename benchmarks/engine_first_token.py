"""Seconds from a command to its first generated token: vLLM by itself, against `argusrl train`. Prints one JSON object.

    python benchmarks/engine_first_token.py [--pairs 3] [--model models/tiny-qwen3vl] [--out runs/first-token]

- plain: a Python process with a plain in-process vLLM engine, as its documentation would have it, samples one token.
- in Ray: the same in a Ray actor with one CPU.
- product: `argusrl train` of the quickstart recipe until the engine's first reply, the one that proves adapters, is
  there (attempts/001/phases.jsonl); also until its first step is committed.

They take turns, so that all meet the same machine. CPU seconds are those of all processes until the first token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from process_tree import ProcessTree

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
ONE_STEP = ["algorithm.num_steps=1", "evaluate.every_steps=0", "observe.display=none", "run.name=run"]


class BareEngine:
    """A plain vLLM engine as its documentation would have it."""

    def first_token(self, model: str) -> dict[str, float]:
        """Seconds of importing vllm, starting the engine and sampling one token, and the time when it was there."""
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
        parts = {name: later - one for name, (one, later) in zip(names, itertools.pairwise(marks), strict=True)}
        return {**parts, "time": marks[-1]}


def in_ray(model: str) -> dict[str, float]:
    """The same in a Ray actor."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": ENVIRONMENT})
    actor: Any = ray.remote(num_cpus=1)(BareEngine).remote()
    parts: dict[str, float] = ray.get(actor.first_token.remote(model), timeout=600)
    ray.shutdown()
    return parts


def vllm_itself(kind: str, model: Path) -> dict[str, float]:
    """One start of `plain` or `in_ray` in a process of its own."""
    tree = ProcessTree()
    began = time.time()
    command = [sys.executable, __file__, "--one", kind, "--model", str(model.absolute())]
    process = tree.start(command, ENVIRONMENT, stdout=subprocess.PIPE)
    output, _ = process.communicate(timeout=600)
    tree.stop()
    parts: dict[str, float] = json.loads(output.splitlines()[-1])
    there = parts.pop("time")
    return {"first_token_seconds": there - began, "cpu_seconds": tree.between(began, there), **parts}


def product(recipe: Path, out: Path) -> dict[str, float]:
    """One start of a new run."""
    shutil.rmtree(out, ignore_errors=True)
    tree = ProcessTree()
    began = time.time()
    command = [sys.executable, "-m", "argusrl.cli.main", "train", str(recipe), *ONE_STEP, f"run.root={out.absolute()}"]
    process = tree.start(command, ENVIRONMENT)
    if process.wait(timeout=600) != 0:
        raise SystemExit(f"argusrl train ended with code {process.returncode}; see {out}")
    tree.stop()
    phases = [json.loads(line) for line in (out / "run" / "attempts" / "001" / "phases.jsonl").read_text().splitlines()]
    there = next(later["time"] for one, later in itertools.pairwise(phases) if one["phase"] == "canary")
    committed = (out / "run" / "commits" / "000001.json").stat().st_mtime
    shutil.rmtree(out)
    return {
        "first_token_seconds": there - began,
        "cpu_seconds": tree.between(began, there),
        "workers_begun_seconds": phases[0]["time"] - began,
        "first_step_seconds": committed - began,
    }


def measure(recipe: Path, model: Path, out: Path, pairs: int = 3) -> dict[str, Any]:
    """Starts in turn; medians, and the product's over that of a plain process."""
    runs: dict[str, list[dict[str, float]]] = {"plain": [], "in_ray": [], "product": []}
    for _ in range(pairs):
        for kind in ("plain", "in_ray"):
            runs[kind].append(vllm_itself(kind, model))
        runs["product"].append(product(recipe, out))
    medians = {
        kind: {name: round(statistics.median(run[name] for run in all_runs), 2) for name in all_runs[0]}
        for kind, all_runs in runs.items()
    }
    return {
        "start_vs_vllm": medians["product"]["first_token_seconds"] / medians["plain"]["first_token_seconds"],
        "start_vs_vllm_in_ray": medians["product"]["first_token_seconds"] / medians["in_ray"]["first_token_seconds"],
        **medians,
        "first_token_seconds": {
            kind: [round(run["first_token_seconds"], 2) for run in all_runs] for kind, all_runs in runs.items()
        },
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny-qwen3vl"))
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.yaml"))
    parser.add_argument("--out", type=Path, default=Path("runs/first-token"))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--one", choices=["plain", "in_ray"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        start = in_ray if options.one == "in_ray" else BareEngine().first_token
        print(json.dumps(start(str(options.model))))
    else:
        print(json.dumps(measure(options.recipe, options.model, options.out, options.pairs), indent=1))


if __name__ == "__main__":
    main()
