"""One `argusrl train` as a user starts it, and where its time and CPU seconds go, step by step."""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from process_tree import ProcessTree

from argusrl.observe.phases import read_phases
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import read_lines

RECIPES = Path(__file__).resolve().parent / "recipes"
RANK = "RankWorker"  # titles of Ray's actors
WARM_UP_STEPS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step; it ends where the next one begins, so commit, checkpoint and bookkeeping are in it."""

    number: int
    step_seconds: float
    step_cpu_seconds: float  # of all processes
    train_seconds: float
    train_cpu_seconds: float  # of all processes
    train_rank_cpu_seconds: float
    metrics: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class ProductRun:
    """A finished run."""

    steps: list[Step] = field(default_factory=list)  # without warm-up and without the last one
    first_token_seconds: float = 0.0  # from the command to the first phase in which the engine sampled
    peak_pss_bytes: int = 0
    rank_peak_pss_bytes: int = 0
    rank_peak_rss_bytes: int = 0
    step_cpu_seconds_by_process: dict[str, float] = field(default_factory=dict)  # mean of the measured steps

    def median_of(self, name: str) -> float:
        return median(float(getattr(step, name)) for step in self.steps)

    def median_metric(self, name: str) -> float:
        return median(float(step.metrics[name]) for step in self.steps)


def train(
    recipe: Path, overrides: list[str], keep: Path | None = None, warm_up_steps: int = WARM_UP_STEPS
) -> ProductRun:
    """Run a recipe to its end in a fresh folder (`keep`, which must not exist, or a temporary one)."""
    with tempfile.TemporaryDirectory(prefix="argusrl-bench-") as temporary:
        path = keep or Path(temporary) / "run"
        command = [sys.executable, "-m", "argusrl.cli.main", "train", str(recipe), f"run.root={path.parent}"]
        command += [f"run.name={path.name}", "observe.display=plain", *overrides]
        tree = ProcessTree()
        began = time.time()
        process = tree.start(command, {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        code = process.wait()
        tree.stop()
        if code != 0:
            raise RuntimeError(f"`{' '.join(command)}` ended with exit code {code}")
        return _measured(RunFolder(path), tree, began, warm_up_steps)


def _measured(folder: RunFolder, tree: ProcessTree, began: float, warm_up_steps: int) -> ProductRun:
    phases = read_phases(folder.phases(_last_attempt(folder)))
    rows = {row["step"]: row for row in read_lines(folder.metrics)}
    starts = {phase["step"]: phase["time"] for phase in phases if phase["phase"] == "rollout"}
    numbers = sorted(starts)
    run = ProductRun(peak_pss_bytes=tree.peak_pss_bytes, rank_peak_pss_bytes=tree.peak_pss_of(RANK))
    run.rank_peak_rss_bytes = max((p.peak_rss_bytes for p in tree.processes.values() if RANK in p.command), default=0)
    run.first_token_seconds = min(phase["time"] for phase in phases if phase["phase"] in ("canary", "sync")) - began
    for number, following in itertools.pairwise(numbers[warm_up_steps:]):
        first, last = starts[number], starts[following]
        trains, synced = (_begin(phases, name, number) for name in ("train", "sync"))
        run.steps.append(
            Step(
                number=number,
                step_seconds=last - first,
                step_cpu_seconds=tree.between(first, last),
                train_seconds=rows[number]["time/train_seconds"],
                train_cpu_seconds=tree.between(trains, synced),
                train_rank_cpu_seconds=tree.between(trains, synced, RANK),
                metrics=rows[number],
            )
        )
    measured = numbers[warm_up_steps:]
    if run.steps:
        first, last = starts[measured[0]], starts[measured[-1]]
        for process in tree.processes.values():
            used = process.used_until(last) - process.used_until(first)
            run.step_cpu_seconds_by_process[f"{process.pid} {process.command[:80].strip()}"] = used / len(run.steps)
    return run


def _begin(phases: list[dict[str, Any]], name: str, step: int) -> float:
    return next(float(phase["time"]) for phase in phases if phase["phase"] == name and phase["step"] == step)


def _last_attempt(folder: RunFolder) -> int:
    return max(int(path.name) for path in folder.attempts.iterdir() if path.name.isdigit())
