"""All figures of docs/benchmarks.md, section Compute, measured on this machine: one JSON object on standard output.

    python benchmarks/bench.py [speedup redundancy step rollout training start driver growth] [--quick]
    make bench

Progress goes to standard error. Without names everything is measured, which takes about half an hour on two idle
cores; --quick takes fewer rounds, for a first look. Beside each figure stands `<figure>_raw`: the measurements it comes
from, how many there are, and how far they are apart. A figure that cannot be measured is null, with the reason.

Figures that compare two programs come from runs that take turns, one thread per process, wall and CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from against_rival import FULL, QUICK, Duel, Effort, Rival, Stage, fight, figures, say, step_shares
from product_run import RECIPES, train
from redundancy import count

from argusrl.storage.layout import RunFolder

ROOT = Path(__file__).resolve().parent.parent
SIZES = (112, 336, 504)
STAGES = {  # stage -> counters; images are encoded by engines and by ranks
    "vision": ("compute/redundancy_encoder", "compute/redundancy_vision"),
    "prefill": ("compute/redundancy_prefill",),
    "training": ("compute/redundancy_training",),
}
COUNTED_STEP = 2


@dataclass(slots=True)
class Bench:
    """One execution: what is measured how thoroughly, and what was found."""

    stage: Stage
    rival: Rival
    effort: Effort
    quick: bool
    found: dict[str, Any] = field(default_factory=dict)
    duels: dict[int, Duel] = field(default_factory=dict)

    def speedup(self) -> None:
        """Against TRL, at three sizes of images."""
        missing = self.rival.missing()
        if missing:
            say(f"the rival is skipped: {missing}")
        for side in SIZES:
            self.duels[side] = fight(self.stage, side, None if missing else self.rival, self.effort)
            self.found |= figures(self.duels[side], side, missing)

    def step(self) -> None:
        """What a step of the 504-pixel recipe spends on other things than rollout and training."""
        if 504 in self.duels:
            runs = self.duels[504].ours
        else:
            runs = [self.stage.our_run(504, self.effort.our_steps) for _ in range(self.effort.rounds)]
        self.found |= step_shares(runs)

    def redundancy(self) -> None:
        """Work over the least work, the largest of three recipes, by the run's counters; a hand count beside it."""
        changes = [f"algorithm.num_steps={COUNTED_STEP}", "evaluate.every_steps=0"]
        recipes = {
            "quickstart": (ROOT / "recipes" / "quickstart.yaml", changes),
            "frozen_lake": (ROOT / "recipes" / "frozen_lake.yaml", changes),
            "one_image_504": (RECIPES / "one_image.yaml", self.stage.changes(504, COUNTED_STEP)),
        }
        counts = {}
        for name, (recipe, overrides) in recipes.items():
            say(f"counting a step of {name}")
            folder = self.stage.folder / "counted" / name
            train(recipe, overrides, keep=folder)
            counts[name] = count(RunFolder(folder), COUNTED_STEP)
        for stage, counters in STAGES.items():
            factors = {f"{name} {key}": one["counters"][key] for name, one in counts.items() for key in counters}
            self.found[f"redundancy_{stage}"] = max(factors.values())
            self.found[f"redundancy_{stage}_raw"] = {
                "factors": factors,
                "spread": [min(factors.values()), max(factors.values())],
                "runs": len(counts),
            }
        self.found["redundancy_counts"] = counts

    def rollout(self) -> None:
        """argusrl's engine against plain vLLM, and merged weights against LoRA kernels."""
        rounds = "4" if self.quick else "6"
        self._script("rollout_throughput.py", ["--rounds", rounds], "rollout_vs_vllm", "merged_vs_lora_decode")

    def training(self) -> None:
        """A rank's training phase against a bare loop, and shared against packed prefixes."""
        words = ["--model", str(self.stage.model)]
        self._script("training_phase.py", words, "train_vs_bare_loop", "shared_vs_packed_504")

    def start(self) -> None:
        """From the command to the first token, against vLLM by itself."""
        pairs = "1" if self.quick else "2"
        out = str(self.stage.folder / "first-token")
        self._script("engine_first_token.py", ["--pairs", pairs, "--out", out], "start_vs_vllm")

    def driver(self) -> None:
        """Memory of the driver over a long history."""
        trajectories = "20000" if self.quick else "100000"
        words = ["--trajectories", trajectories, "--out", str(self.stage.folder / "driver-memory")]
        self._script("driver_memory.py", words, "driver_bytes_per_trajectory", "driver_bytes_per_image")

    def growth(self) -> None:
        """Whether any process of a run grows from step to step."""
        words = ["--steps", "80" if self.quick else "240", "--out", str(self.stage.folder / "growth")]
        self._script("growth.py", words, "growth_share_per_step")

    def _script(self, name: str, words: list[str], *keys: str) -> None:
        """Figures of a script of this folder, which prints one JSON object with at least these keys."""
        say(name)
        command = [sys.executable, str(ROOT / "benchmarks" / name), *words]
        quiet = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, env=quiet, check=False, cwd=ROOT)
        try:
            report = json.loads(done.stdout)
        except ValueError:
            report = {"reason": f"{name} ended with exit code {done.returncode} and printed no JSON object"}
        for key in keys:
            self.found[key] = report.get(key)
            self.found[f"{key}_raw"] = report


def main() -> int:
    sections: dict[str, Callable[[Bench], None]] = {
        "speedup": Bench.speedup,
        "step": Bench.step,
        "redundancy": Bench.redundancy,
        "rollout": Bench.rollout,
        "training": Bench.training,
        "start": Bench.start,
        "driver": Bench.driver,
        "growth": Bench.growth,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(sections)}; default is all")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps")
    parser.add_argument("--rival", type=Path, default=ROOT.parent / "shared" / "bench" / "bench_trl.py")
    parser.add_argument("--rival-python", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    options = parser.parse_args()
    unknown = [name for name in options.sections if name not in sections]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(sections)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="argusrl-bench-") as folder:
        bench = Bench(
            stage=Stage(Path(folder)),
            rival=Rival(script=options.rival, python=options.rival_python),
            effort=QUICK if options.quick else FULL,
            quick=options.quick,
        )
        for name, measure in sections.items():
            if name in options.sections or not options.sections:
                measure_or_say_why(name, measure, bench)
    bench.found["machine"] = {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "load_average_at_end": os.getloadavg(),
        "seconds": time.monotonic() - began,
    }
    print(json.dumps(rounded(bench.found), indent=1))
    return 0 if "failed" not in bench.found else 1


def measure_or_say_why(name: str, measure: Callable[[Bench], None], bench: Bench) -> None:
    """A section that fails does not take the others with it."""
    try:
        measure(bench)
    except Exception as error:
        say(f"{name} failed: {error}")
        bench.found.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"


def rounded(value: Any) -> Any:
    """Numbers with five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return value


if __name__ == "__main__":
    sys.exit(main())
