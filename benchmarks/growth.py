"""Whether any process of a run grows from step to step: memory, threads and open files over many small steps, as JSON.

    python benchmarks/growth.py [--steps 240] [--recipe recipes/quickstart.yaml] [--out runs/growth] [changes to it]

A real run, step after step as fast as it goes. After every step each process of the run, whoever started it, is read:
private memory and PSS, threads, open files. The first quarter of the steps is left out. What counts is the median
slope between all pairs of the rest (Theil and Sen), per step and as a share of the median: at most 0.1 %.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from process_tree import ProcessTree

WARM_UP_SHARE = 0.25
MOST_SHARE_PER_STEP = 0.001
LOOK_SECONDS = 0.05
QUANTITIES = ("private_bytes", "pss_bytes", "threads", "open_files")
SMALL_STEPS = [
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "algorithm.updates_per_step=1",
    "evaluate.every_steps=0",
    "observe.display=none",
]
_PARTS = (
    (re.compile(r"ray::(?:.*:)?(\w+Worker)"), None),
    (re.compile(r"argusrl\.training\.driver"), "driver"),
    (re.compile(r"argusrl(?:\.cli\.main)? train"), "supervisor"),
    (re.compile(r"dashboard/agent|DashboardAgent"), "ray dashboard agent"),
    (re.compile(r"runtime_env/agent|RuntimeEnvAgent"), "ray runtime environment agent"),
    (re.compile(r"raylet/raylet"), "raylet"),
    (re.compile(r"gcs_server"), "gcs"),
    (re.compile(r"spawn_main"), "pool process"),
)


def name_of(command: str) -> str:
    """What a process is, by its command line."""
    for pattern, name in _PARTS:
        if match := pattern.search(command):
            return name or match[1]
    return command[:60].strip()


def reading(pid: int) -> dict[str, int] | None:
    """Memory, threads and open files of a process; None when it is gone."""
    folder = Path(f"/proc/{pid}")
    try:
        rollup = dict(_kibibytes(folder / "smaps_rollup"))
        threads = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("Threads"))
        return {
            "private_bytes": (rollup["Private_Clean"] + rollup["Private_Dirty"]) << 10,
            "pss_bytes": rollup["Pss"] << 10,
            "threads": int(threads.split()[1]),
            "open_files": len(os.listdir(folder / "fd")),
        }
    except (OSError, StopIteration, KeyError):
        return None


def _kibibytes(path: Path) -> Sequence[tuple[str, int]]:
    lines = [line.split() for line in path.read_text().splitlines()[1:]]
    return [(words[0].rstrip(":"), int(words[1])) for words in lines]


def slope(steps: Sequence[float], values: Sequence[float]) -> float:
    """Median of the slopes between all pairs."""
    pairs = [
        (values[later] - values[one]) / (steps[later] - steps[one])
        for one in range(len(steps))
        for later in range(one + 1, len(steps))
        if steps[later] != steps[one]
    ]
    return statistics.median(pairs) if pairs else 0.0


def grown(steps: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """Median, and growth per step, absolute and as a share."""
    middle, per_step = statistics.median(values), slope(steps, values)
    return {"median": middle, "per_step": round(per_step, 3), "share_per_step": per_step / middle if middle else 0.0}


def measure(recipe: Path, out: Path, steps: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Run and sample; the growth of every process that was there from the warm-up to the end."""
    shutil.rmtree(out, ignore_errors=True)
    changes = [*SMALL_STEPS, f"algorithm.num_steps={steps}", f"run.root={out.absolute()}", "run.name=run", *overrides]
    command = [sys.executable, "-m", "argusrl.cli.main", "train", str(recipe), *changes]
    tree = ProcessTree()
    process = tree.start(command)
    series: dict[int, list[tuple[int, dict[str, int]]]] = defaultdict(list)
    metrics, done, began = out / "run" / "metrics.jsonl", 0, time.monotonic()
    while process.poll() is None:
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if lines > done:
            done = lines
            for pid in list(tree.processes):
                if (found := reading(pid)) is not None:
                    series[pid].append((done, found))
        time.sleep(LOOK_SECONDS)
    tree.stop()
    first = steps * WARM_UP_SHARE
    processes = []
    for pid, samples in series.items():
        samples = [(step, found) for step, found in samples if step >= first]
        if len(samples) < 0.8 * (done - first):  # it came later, or went before the end
            continue
        at = [float(step) for step, _ in samples]
        own = {name: grown(at, [float(found[name]) for _, found in samples]) for name in QUANTITIES}
        processes.append({"process": name_of(tree.processes[pid].command), **own})
    row = [json.loads(line) for line in metrics.read_text().splitlines()]
    worst = max(processes, key=lambda one: one["private_bytes"]["share_per_step"], default=None)
    return {
        "growth_share_per_step": worst["private_bytes"]["share_per_step"] if worst else None,
        "growth_process": worst["process"] if worst else None,
        "steps": done,
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "step_seconds": statistics.median(one["time/step_seconds"] for one in row if "time/step_seconds" in one),
        "processes": processes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.yaml"))
    parser.add_argument("--out", type=Path, default=Path("runs/growth"))
    parser.add_argument("overrides", nargs="*", help="changes to the recipe")
    options = parser.parse_args()
    report = measure(options.recipe, options.out, options.steps, options.overrides)
    print(json.dumps(report, indent=1))
    whole = report["exit_code"] == 0 and report["steps"] >= options.steps
    return 0 if whole and report["growth_share_per_step"] < MOST_SHARE_PER_STEP else 1


if __name__ == "__main__":
    sys.exit(main())
