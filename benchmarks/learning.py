"""What the shipped recipes learn, and the controls that must learn nothing.

    python benchmarks/learning.py quickstart [--seeds 0 1 2]
    python benchmarks/learning.py noise | still | digits | frozen_lake

Prints one JSON object a run: held-out accuracy before and after, seconds, CPU seconds, largest log-probability gap.
The digits recipe needs its files: python examples/digits_to_parquet.py data/digits
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from argusrl.journal.commits import CommitChain
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import read_lines

RECIPES = {
    "quickstart": ("quickstart.yaml", []),
    "noise": ("quickstart.yaml", ["data.options.images=noise"]),
    "still": ("quickstart.yaml", ["optimizer.learning_rate=0", "algorithm.num_steps=10"]),
    "digits": ("digits.yaml", []),
    "frozen_lake": ("frozen_lake.yaml", []),
}


def run(name: str, seed: int, overrides: list[str]) -> dict[str, object]:
    """Train one recipe and report."""
    file, own = RECIPES[name]
    recipe = Path(__file__).parents[1] / "recipes" / file
    with tempfile.TemporaryDirectory(prefix="argusrl-learning-") as root:
        words = [sys.executable, "-m", "argusrl.cli.main", "train", str(recipe)]
        words += [f"run.root={root}", "run.name=run", f"run.seed={seed}", "observe.display=plain", *own, *overrides]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began, started = time.time(), time.monotonic()
        code = subprocess.run(words, stdout=sys.stderr, check=False).returncode
        seconds = time.monotonic() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        folder = RunFolder(Path(root) / "run")
        rows = read_lines(folder.metrics)
        steps = [row for row in rows if row["step"] > 0]
        evaluations = [row for row in rows if "evaluate/sampled/accuracy" in row]
        first = CommitChain(folder).read(1)
        return {
            "recipe": name,
            "seed": seed,
            "exit_code": code,
            "steps": len(steps),
            "seconds": round(seconds, 1),
            "first_step_after_seconds": round(first.time - began, 1),
            "driver_cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
            "sampled": [round(row["evaluate/sampled/accuracy"], 3) for row in evaluations],
            "greedy": [round(row["evaluate/greedy/accuracy"], 3) for row in evaluations],
            "logprob_gap_max": max(row["policy/logprob_gap_max"] for row in steps),
            "sync_milliseconds_median": round(
                1000 * sorted(row["time/sync_seconds"] for row in steps)[len(steps) // 2]
            ),
            "sync_milliseconds_max": round(1000 * max(row["time/sync_seconds"] for row in steps)),
            "step_seconds_median": round(sorted(row["time/step_seconds"] for row in steps)[len(steps) // 2], 2),
            "driver_megabytes_max": round(max(row["memory/driver_bytes"] for row in steps) / 1e6),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    for seed in options.seeds:
        print(json.dumps(run(options.recipe, seed, options.overrides)), flush=True)


if __name__ == "__main__":
    main()
