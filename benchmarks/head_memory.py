"""Memory of the head's pod in the reference job, as predicted and as simulated with 100,000 trajectories: JSON.

    python benchmarks/head_memory.py [--trajectories 100000] [--out runs/head-memory]

The job: Qwen3-VL-8B, LoRA 32, six engines, 64 prompts x 8 a step, 15 turns with an image each. Simulated is everything
but the model: a Ray head as a RayJob has it (no CPUs, dashboard, an object store of 1 GiB) and a node for the workers,
the real supervisor and driver, and stand-ins for the workers that write records of that size (driver_memory.py). PSS of
all processes of the head is read every two seconds. `head_pod_bytes` has the object store whole on top, full or not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from driver_memory import OPTIONS
from growth import name_of
from process_tree import ProcessTree

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, GROUP, TURNS, ENGINES = 64, 8, 15, 6
STORE_BYTES = 1 << 30
DRIVER_BOUND, POD_BOUND = 10**9, 16 << 30
_SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
_COMMON = ("--block", "--min-worker-port", "0", "--max-worker-port", "0", "--disable-usage-stats")
_START_SECONDS = 60.0
INTERRUPTED = 75


@contextmanager
def ray_nodes(folder: Path) -> Iterator[tuple[ProcessTree, str]]:
    """A head that does nothing but be one, watched, and a node with CPUs for the workers."""
    start = [sys.executable, "-m", "ray.scripts.scripts", "start"]
    head = ProcessTree()
    options = ["--head", "--port", "0", "--num-cpus", "0", "--include-dashboard", "true", "--dashboard-port", "0"]
    options += ["--object-store-memory", str(STORE_BYTES), "--temp-dir", str(folder / "head")]
    head.start([*start, *options, *_COMMON], _SETTINGS)
    others = []
    try:
        address = _address(folder / "head" / "ray_current_cluster")
        options = ["--address", address, "--num-cpus", str(2 * ENGINES), "--object-store-memory", str(200 << 20)]
        worker = ProcessTree()
        others.append(worker)
        worker.start([*start, *options, "--temp-dir", str(folder / "node"), *_COMMON], _SETTINGS)
        yield head, address
    finally:
        for tree in (*others, head):
            tree.stop()
            _end(tree)


def _address(file: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if file.exists() and (text := file.read_text().strip()):
            return text
        time.sleep(0.1)
    raise TimeoutError(f"Ray's head wrote no {file} within {_START_SECONDS:.0f} s")


def _end(tree: ProcessTree) -> None:
    for process in tree.processes:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def _ended(process: subprocess.Popen[bytes], limit_seconds: float) -> int:
    """The exit code; a run that takes longer is asked to stop."""
    try:
        return process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        return process.wait()


def simulate(out: Path, trajectories: int, limit_seconds: float) -> dict[str, Any]:
    """PSS of the head's processes while the run goes on, the largest of each and of all together."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    steps = -(-trajectories // (PROMPTS * GROUP))
    with tempfile.TemporaryDirectory(prefix="arh-", dir="/tmp") as folder, ray_nodes(Path(folder)) as (head, address):
        options = {
            "steps": steps,
            "step_trajectories": PROMPTS * GROUP,
            "images": TURNS,
            "out": str(out.absolute()),
            "changes": [
                f"cluster.address={address}",
                "cluster.device=cpu",
                f"cluster.slots={ENGINES}",
                f"cluster.episode_workers={ENGINES}",
            ],
        }
        run = ProcessTree()
        command = [sys.executable, str(ROOT / "benchmarks" / "driver_memory.py"), "--supervise"]
        began = time.monotonic()
        process = run.start(command, {**_SETTINGS, OPTIONS: json.dumps(options)})
        code = _ended(process, limit_seconds)
        seconds = time.monotonic() - began
        run.stop()
        if code not in (0, INTERRUPTED):
            raise RuntimeError(f"the run ended with {code}")
        samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        processes = _largest(head) | {
            name: size for name, size in _largest(run).items() if name in ("driver", "supervisor")
        }
        together = head.peak_pss_bytes + run.peak_pss_bytes
    shutil.rmtree(out)
    return {
        "trajectories": samples[-1]["trajectories"],
        "steps": len(samples),
        "seconds": round(seconds, 1),
        "processes": processes,
        "driver_bytes": processes["driver"],
        "driver_private_bytes_first": samples[len(samples) // 10]["private_bytes"],
        "driver_private_bytes_last": samples[-1]["private_bytes"],
        "processes_bytes": together,
        "head_pod_bytes": together + STORE_BYTES,
    }


def _largest(tree: ProcessTree) -> dict[str, int]:
    """By kind of process, summed."""
    found: dict[str, int] = {}
    for process in tree.processes.values():
        kind = "driver" if "--drive" in process.command else "supervisor" if "--supervise" in process.command else ""
        kind = kind or name_of(process.command)
        found[kind] = found.get(kind, 0) + process.peak_pss_bytes
    return found


def predict(steps: int) -> dict[str, Any]:
    """The head's table of the plan, on three nodes of two GPUs."""
    from argusrl.cluster.plan.machine import machine_of
    from argusrl.cluster.plan.plan import make_plan
    from argusrl.config.load import load_config
    from argusrl.config.model_shape import ModelShape

    changes = [f"algorithm.prompts_per_step={PROMPTS}", f"algorithm.group_size={GROUP}", f"algorithm.num_steps={steps}"]
    config = load_config(ROOT / "recipes" / "qwen3vl_8b_hyperpod.yaml", changes).config
    machine = machine_of(config, instance_name="ml.g7e.12xlarge", nodes=3)
    plan = make_plan(config, ModelShape.find("Qwen3-VL-8B-Instruct"), machine, compare=False)
    assert plan.head is not None
    lines = {line.name: line.size for line in plan.head.lines}
    return {"lines": lines, "driver_bytes": lines["driver"], "head_pod_bytes": plan.head.peak()[1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("runs/head-memory"))
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop the simulation after so long")
    options = parser.parse_args()
    simulated = simulate(options.out, options.trajectories, options.seconds)
    predicted = predict(simulated["steps"])
    errors = {name: round(predicted[name] / simulated[name] - 1, 4) for name in ("driver_bytes", "head_pod_bytes")}
    within = all(
        one["driver_bytes"] < DRIVER_BOUND and one["head_pod_bytes"] < POD_BOUND for one in (predicted, simulated)
    )
    report = {"predicted": predicted, "simulated": simulated, "error": errors, "within": within}
    print(json.dumps(report, indent=1))
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
