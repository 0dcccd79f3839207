"""What `argusrl plan` says of a run against what the run takes, on this machine's CPUs: one JSON object.

    python benchmarks/plan_against_run.py [--models tiny medium] [--out runs/plan]

For the tiny model and a random one of about 70 M parameters:

- a rank: bytes of tensors, counted as torch makes them, line by line and in each phase, for one micro-batch;
- an engine: its own count of weights and KV cache;
- the host: PSS of every process of a run of `argusrl train` (page tables of the kernel), the largest of each.

Each line has `predicted`, `measured` and their `error`; lines below a tenth of a percent of the total are left out of
`worst_line_error`, since a page more or less decides there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("tiny", "medium")
SIDE, PROMPTS, GROUP, RESPONSE, QUESTION, STEPS = 112, 8, 8, 32, 24, 4
LORA_RANK = 16
CACHE_BYTES = 256 << 20
LEAST_SHARE = 0.001
LINE_BOUND, TOTAL_BOUND = 0.15, 0.10


def model_folder(name: str, out: Path) -> Path:
    """The model of that name; a random one is made at its first use."""
    if name == "tiny":
        return ROOT / "models" / "tiny-qwen3vl"
    folder = out / name
    if not folder.exists():
        from random_model import make_model

        make_model(folder, size=name)
    return folder


def compared(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, Any]:
    """Line by line; `total` is a line like any other."""
    lines = {}
    for name, value in predicted.items():
        found = measured[name]
        lines[name] = {
            "predicted": round(value),
            "measured": round(found),
            "error": round(value / found - 1, 4) if found else None,
        }
    return lines


def worst(lines: dict[str, Any]) -> float:
    """Largest |error| of the lines that matter."""
    least = LEAST_SHARE * max(line["measured"] for line in lines.values())
    return max((abs(line["error"]) for line in lines.values() if line["measured"] > least), default=0.0)


# ---- a rank


def rank(folder: Path) -> dict[str, Any]:
    """Tensors of one rank, counted while it does an update with one micro-batch."""
    sys.path.insert(0, str(ROOT / "tests"))
    import torch

    from argusrl.config.estimate import MicroBatch, training_memory
    from argusrl.config.model_shape import ModelShape
    from argusrl.policy import group
    from argusrl.policy.logprobs import token_logprobs
    from argusrl.policy.model import head_of
    from argusrl.policy.optimizer import make_adamw
    from argusrl.policy.policy import Policy
    from argusrl.policy.settings import PolicySettings
    from argusrl.policy.step_work import StepWork
    from fakes.live_bytes import LiveBytes

    torch.set_num_threads(1)
    store = group.host_store()
    group.connect(rank=0, world=1, host="127.0.0.1", port=store.port, name="plan")
    settings = PolicySettings(model=str(folder), device="cpu", dtype="float32", rank=LORA_RANK, alpha=2.0 * LORA_RANK)
    policy = Policy(settings)
    scorer, inputs = policy._scorer, policy._inputs
    rows = make_rows(inputs, scorer.base.config)
    shape = ModelShape.read(folder)
    vision = shape.vision
    assert vision is not None
    image_tokens = rows[0].turns[0].prompt_ids.count(scorer.base.config.image_token_id)
    micro_batch = MicroBatch.of_groups(
        PROMPTS,
        prompt_tokens=len(rows[0].turns[0].prompt_ids),
        response_tokens=RESPONSE,
        group_size=GROUP,
        patches=image_tokens * vision.merge**2,
    )
    memory = training_memory(
        shape, micro_batch, element_bytes=4, rank=LORA_RANK, gradient_checkpointing=False, foreach=False
    )
    banned = torch.tensor([0])

    def small(tensors: Any) -> int:
        return sum(one.to_local().nbytes if hasattr(one, "to_local") else one.nbytes for one in tensors)

    trained = [one for one in scorer.parameters() if one.requires_grad]
    frozen = [one for one in scorer.parameters() if not one.requires_grad]
    work, counted = StepWork(), LiveBytes()
    with counted:
        batch = inputs.pack(rows, work)
        packed = counted.now
        logprobs, _ = scorer(batch, 1.0, banned, work)
        forward, kept = counted.peak, counted.now
        counted.peak = counted.now
        logprobs.sum().backward()
        backward = counted.peak
    moments = [state[name] for state in policy._optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    measured = {
        "base weights": small({id(one): one for one in frozen}.values()),
        "adapter": small(trained),
        "gradients": small(one.grad for one in trained),
        "optimizer": small(moments),
        "image features": sum(held.bytes for held in work.features.values()),
    }
    del logprobs
    update = LiveBytes()  # of plain tensors: what DTensors hold is not seen
    plain = [torch.nn.Parameter(torch.zeros(one.to_local().shape)) for one in trained]
    optimizer = make_adamw(plain, settings)
    for one in plain:
        one.grad = torch.zeros_like(one)
    with update:
        optimizer.step()
    pixels = batch.image_inputs["pixel_values"]
    tower, chunk = LiveBytes(), LiveBytes()
    grids = batch.image_inputs["image_grid_thw"]
    inner = scorer.base.model
    for module in scorer.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    with torch.no_grad(), tower:
        inner.get_image_features(pixels, grids)
    head = head_of(scorer.base).weight.detach()
    hidden = torch.randn(micro_batch.predicted_tokens, shape.hidden).requires_grad_()
    targets = torch.zeros(micro_batch.predicted_tokens, dtype=torch.long)
    with chunk:
        token_logprobs(hidden, head, None, targets, temperature=1.0, banned=banned)
    norm = micro_batch.tokens * (shape.hidden + 1) * 4
    picked = hidden.nbytes
    slopes = micro_batch.predicted_tokens * shape.hidden * 4
    measured |= {
        "micro-batch": packed,
        "activations": kept - packed - measured["image features"] - norm - slopes,
        "vision tower at work": tower.peak,
        "logits chunk": chunk.peak + norm + picked,
        "optimizer's temporaries": update.peak,
        "in the forward": forward,
        "in the backward": backward,
    }
    held = memory.resident
    predicted = {
        "base weights": memory.base,
        "adapter": memory.trained,
        "gradients": memory.gradients,
        "optimizer": memory.moments,
        "image features": memory.features,
        "micro-batch": memory.batch,
        "activations": memory.activations,
        "vision tower at work": memory.tower,
        "logits chunk": memory.head,
        "optimizer's temporaries": memory.update,
        "in the forward": max(memory.phases["head"], memory.phases["tower"]) - held - memory.gradients,
        "in the backward": memory.phases["backward"] - held,
    }
    resident = measured["base weights"] + measured["adapter"] + measured["optimizer"]
    predicted["total"] = memory.total
    measured["total"] = resident + max(forward, backward, update.peak + measured["gradients"])
    return {"micro_batch": {"tokens": micro_batch.tokens, "patches": micro_batch.patches}, **_both(predicted, measured)}


def make_rows(inputs: Any, config: Any) -> list[Any]:
    """Rows of PROMPTS groups: a picture and a question, GROUP replies."""
    from gpu_training import _image

    from argusrl.policy.rows import Row, RowTurn

    special = {value for name, value in config.to_dict().items() if name.endswith("_token_id")}
    words = [token for token in range(config.get_text_config().vocab_size) if token not in special]
    rows = []
    for number in range(PROMPTS):
        picture = _image(SIDE, number)
        marks = (config.image_token_id,) * inputs.image_tokens(picture)
        text = tuple(words[(number * 31 + place * 17) % len(words)] for place in range(QUESTION))
        prompt = (config.vision_start_token_id, *marks, config.vision_end_token_id, *text)
        for sample in range(GROUP):
            reply = tuple(words[(sample * 101 + place * 29 + sample) % len(words)] for place in range(RESPONSE))
            turn = RowTurn(prompt_ids=prompt, response_ids=reply, logprobs=(-1.0,) * RESPONSE)
            rows.append(Row(turns=(turn,), advantage=1.0 if sample % 2 else -1.0, images=(picture,)))
    return rows


def _both(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, Any]:
    lines = compared(predicted, measured)
    return {"lines": lines, "worst_line_error": round(worst(lines), 4), "total_error": lines["total"]["error"]}


# ---- an engine


def engine(folder: Path) -> dict[str, Any]:
    """Weights and cache, as vLLM's own worker holds them."""
    from rollout_throughput import TARGETS, settings_of

    from argusrl.config.estimate import engine_memory
    from argusrl.config.model_shape import ModelShape
    from argusrl.rollout.vllm_engine import VllmEngine

    shape = ModelShape.read(folder)
    settings = settings_of({"model": str(folder), "device": "cpu"}, True)
    running = VllmEngine.start(settings)
    (found,) = running._engine.collective_rpc(_worker_bytes)
    memory = engine_memory(
        shape, element_bytes=4, rank=LORA_RANK, target=TARGETS, merged=True, cache_bytes=settings.cache_bytes
    )
    predicted = {
        "engine weights": memory.weights,
        "KV cache": memory.cache,
        "pristine weights": memory.host_pristine,
        "total": memory.weights + memory.cache,
    }
    found["total"] = found["engine weights"] + found["KV cache"]
    return _both(predicted, found)


def _worker_bytes(worker: Any) -> dict[str, int]:
    """Runs in vLLM's worker. On CPU a linear layer keeps a packed copy alone, of as many numbers as its weight had."""
    runner = worker.model_runner
    model = runner.get_model()
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    packed = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and not weight.numel() and hasattr(module, "input_size_per_partition"):
            packed += module.output_size_per_partition * module.input_size_per_partition * weight.element_size()
    cache = {}
    for tensor in runner.kv_caches:
        for one in tensor if isinstance(tensor, (list, tuple)) else [tensor]:
            cache[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return {
        "engine weights": sum(storages.values()) + packed,
        "KV cache": sum(cache.values()),
        "pristine weights": worker.merged_weights.pristine_bytes,
    }


# ---- the host


def host(folder: Path, out: Path) -> dict[str, Any]:
    """PSS of the processes of a run, the largest of each, against the lines of the plan."""
    from growth import name_of
    from noise_images import write_rows
    from process_tree import ProcessTree

    from argusrl.cluster.plan.machine import machine_of
    from argusrl.cluster.plan.plan import make_plan
    from argusrl.config.load import load_config
    from argusrl.config.model_shape import ModelShape

    data = out / f"{SIDE}.parquet"
    if not data.exists():
        write_rows(data, SIDE, PROMPTS * STEPS)
    recipe = ROOT / "benchmarks" / "recipes" / "one_image.yaml"
    changes = [
        f"model.path={folder}",
        f"model.max_pixels={SIDE * SIDE}",
        "model.max_tokens=96",
        f"data.train={data}",
        f"algorithm.num_steps={STEPS}",
        f"algorithm.prompts_per_step={PROMPTS}",
        f"algorithm.group_size={GROUP}",
        f"adapter.rank={LORA_RANK}",
        f"rollout.max_response_tokens={RESPONSE}",
        f"engine.cache_bytes={CACHE_BYTES}",
        "observe.display=none",
        f"run.root={out.absolute()}",
        f"run.name={folder.name}-run",
    ]
    shutil.rmtree(out / f"{folder.name}-run", ignore_errors=True)
    config = load_config(recipe, changes).config
    plan = make_plan(config, ModelShape.read(folder), machine_of(config), compare=False)
    tree = ProcessTree()
    process = tree.start(
        [sys.executable, "-m", "argusrl.cli.main", "train", str(recipe), *changes], {"OMP_NUM_THREADS": "1"}
    )
    code = process.wait()
    tree.stop()
    if code:
        raise RuntimeError(f"the run ended with {code}")
    measured: dict[str, float] = {}
    for one in tree.processes.values():
        name = _part(name_of(one.command))
        measured[name] = measured.get(name, 0) + one.peak_pss_bytes
    measured["total"] = tree.peak_pss_bytes
    events = [json.loads(line) for line in (out / f"{folder.name}-run" / "events.jsonl").read_text().splitlines()]
    told = next((event for event in events if event["kind"] == "plan"), None)
    return {**_both(predicted_host(plan), measured), "parts": measured, "event": told and told["compared"]}


def predicted_host(plan: Any) -> dict[str, float]:
    """By process, from the lines of the plan."""
    worker = plan.worker
    tensors = {"ranks": 0, "engines": 0}
    for of in tensors:
        own = [line for line in worker.lines if line.name.endswith(f"({of})")]
        tensors[of] = max(sum(line.in_phase(phase) for line in own) for phase in worker.totals)
    pristine = worker.size("pristine weights")  # mapped pages count as long as the kernel leaves them there
    return {
        "rank": worker.size("rank processes") + worker.size("rows and images of the step") + tensors["ranks"],
        "engine": worker.size("engine processes") + worker.size("processed images") + tensors["engines"] + pristine,
        "episode worker": worker.size("episode workers"),
        "driver": worker.size("driver"),
        "supervisor": worker.size("supervisor"),
        "ray": worker.size("Ray's daemons") + worker.size("GCS"),
        "total": worker.peak()[1] + pristine,
    }


def _part(name: str) -> str:
    """Which line of the plan a process belongs to."""
    known = {"RankWorker": "rank", "EngineWorker": "engine", "EpisodeWorker": "episode worker"}
    known |= {"driver": "driver", "supervisor": "supervisor", "pool process": "episode worker"}
    if name in known:
        return known[name]
    return "ray" if re.search(r"raylet|gcs|ray|agent|log_monitor", name) else "other"


def child(part: str, folder: Path) -> dict[str, Any]:
    """`rank` or `engine` in a process of its own."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, f"--{part}", str(folder), "--answer", answer.name]
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
        found: dict[str, Any] = json.loads(Path(answer.name).read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=Path("runs/plan"))
    parser.add_argument("--parts", nargs="+", choices=("rank", "engine", "host"), default=["rank", "engine", "host"])
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for part, measure in (("rank", rank), ("engine", engine)):
        if (folder := getattr(options, part)) is not None:
            options.answer.write_text(json.dumps(measure(folder)))
            return 0
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {}
    for name in options.models:
        folder = model_folder(name, options.out).absolute()
        report[name] = {
            part: host(folder, options.out) if part == "host" else child(part, folder) for part in options.parts
        }
    found = [part for one in report.values() for part in one.values()]
    report["worst_line_error"] = max(one["worst_line_error"] for one in found)
    report["worst_total_error"] = max(abs(one["total_error"]) for one in found)
    report["within"] = report["worst_line_error"] <= LINE_BOUND and report["worst_total_error"] <= TOTAL_BOUND
    print(json.dumps(report, indent=1))
    return 0 if report["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
