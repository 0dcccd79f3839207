"""Memory of the driver per trajectory and per image, over a long history: prints the figures as JSON.

    python benchmarks/driver_memory.py [--trajectories 100000] [--out runs/driver-memory]

The driver is the real one: supervisor, Ray, fleets, journal, plans, commits, garbage collection, metrics. Only the
workers are stand-ins (stand_in_workers.py), which write real records that show some of 64 images of one megapixel.
After every step and a collection of Python's garbage the driver notes its private memory (USS) and the number of
blocks that Python has allocated.

- Slope of the private memory over the whole history, by least squares, with 1 and with 8 images per trajectory (and the
  median of the slopes of all pairs, from which the bytes per image come). The first tenth is left out: a process grows
  until it has done everything once.
- Memory of one open step: what the private memory's peak has more when a step has 16,384 trajectories, not 512.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OPTIONS = "DRIVER_MEMORY"  # environment of the driver: what to measure
GROUP_SIZE = 8
WARM_UP_SHARE = 0.1
SMALL_STEP, LARGE_STEP, LARGE_STEPS = 512, 16_384, 3
MANY_IMAGES = 8
ROUNDING_BYTES = 2.0  # per image: a page or two more or less at the end of the history


def slope(places: Sequence[float], values: Sequence[float]) -> float:
    """Of the line of least squares; 0 for fewer than two places."""
    return statistics.linear_regression(places, values).slope if len(set(places)) > 1 else 0.0


def median_slope(places: Sequence[float], values: Sequence[float]) -> float:
    """Of all pairs (Theil and Sen): a reading that fell into a collection of old files does not move it."""
    points = list(zip(places, values, strict=True))
    slopes = [(y - v) / (x - u) for (u, v), (x, y) in itertools.combinations(points, 2) if x != u]
    return statistics.median(slopes) if slopes else 0.0


def history(out: Path, *, trajectories: int, step_trajectories: int, images: int) -> dict[str, Any]:
    """Drive a run of stand-ins in a process of its own; what its driver noted after every step."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    steps = -(-trajectories // step_trajectories)
    options = {"steps": steps, "step_trajectories": step_trajectories, "images": images, "out": str(out.absolute())}
    command = [sys.executable, __file__, "--supervise"]
    subprocess.run(command, env={**os.environ, OPTIONS: json.dumps(options)}, stdout=sys.stderr, check=True)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    shutil.rmtree(out)
    warm = samples[int(len(samples) * WARM_UP_SHARE) :]
    places = [sample["trajectories"] for sample in warm]
    private = [sample["private_bytes"] for sample in warm]
    return {
        "trajectories": samples[-1]["trajectories"],
        "steps": len(samples),
        "images_per_trajectory": images,
        "bytes_per_trajectory": slope(places, private),
        "bytes_per_trajectory_median": median_slope(places, private),
        "blocks_per_trajectory": slope(places, [sample["blocks"] for sample in warm]),
        "private_bytes_first": private[0],
        "private_bytes_last": private[-1],
        "peak_bytes_of_a_step": statistics.median(sample["peak_bytes"] for sample in warm),
        "step_seconds": statistics.median(sample["step_seconds"] for sample in warm),
    }


def measure(out: Path, trajectories: int = 100_000) -> dict[str, Any]:
    """All figures, and whether they are within their bounds."""
    few = history(out, trajectories=trajectories, step_trajectories=SMALL_STEP, images=1)
    many = history(out, trajectories=trajectories, step_trajectories=SMALL_STEP, images=MANY_IMAGES)
    large = history(out, trajectories=LARGE_STEPS * LARGE_STEP, step_trajectories=LARGE_STEP, images=1)
    per_image = (many["bytes_per_trajectory_median"] - few["bytes_per_trajectory_median"]) / (MANY_IMAGES - 1)
    open_step = (large["peak_bytes_of_a_step"] - few["peak_bytes_of_a_step"]) / (LARGE_STEP - SMALL_STEP)
    return {
        "driver_bytes_per_trajectory": round(max(few["bytes_per_trajectory"], many["bytes_per_trajectory"]), 2),
        "driver_bytes_per_image": round(per_image, 2),
        "open_step_bytes_per_trajectory": round(open_step),
        "histories": [few, many, large],
    }


def supervise() -> int:
    """Make the run folder and supervise the driver below, as `argusrl train` does."""
    from argusrl.config.load import load_config
    from argusrl.recovery import supervisor
    from argusrl.recovery.resume import choose_run, create_run

    options = json.loads(os.environ[OPTIONS])
    recipe = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
    prompts = options["step_trajectories"] // GROUP_SIZE
    changes = [
        f"run.root={options['out']}",
        f"algorithm.num_steps={options['steps']}",
        f"algorithm.prompts_per_step={prompts}",
        f"algorithm.group_size={GROUP_SIZE}",
        "evaluate.every_steps=0",
        "checkpoint.keep_trajectories=false",
        *options.get("changes", ()),
    ]
    choice = choose_run(load_config(recipe, changes).config)
    create_run(choice)
    supervisor.DRIVER = (sys.executable, __file__, "--drive")  # type: ignore[assignment]
    return supervisor.supervise(choice.folder, choice.config, say=print)


def drive(arguments: list[str]) -> int:
    """The driver, with stand-ins for its workers and a display that takes the samples."""
    from stand_in_workers import StandInHiring

    from argusrl.training import bring_up, driver
    from argusrl.training.checks import CheckedInput

    options = json.loads(os.environ[OPTIONS])
    checked = CheckedInput(
        prompts=options["step_trajectories"] * 4,
        heldout_prompts=0,
        bad_rows={"train": []},
        max_images=8,
        banned_ids=(),
        end_ids=(1,),
        adapted_layers=("q_proj",),
        warnings=(),
    )
    driver.InputCheck = lambda _: SimpleNamespace(result=lambda: checked, stop=lambda: None)  # type: ignore
    driver.make_display = lambda _: sampling_display(Path(options["out"]), options)  # type: ignore[assignment]
    bring_up.Hiring = partial(StandInHiring, images=options["images"])  # type: ignore[assignment,misc]
    return driver.main(arguments)


def sampling_display(out: Path, options: dict[str, Any]) -> Any:
    """A plain display that notes the memory of this process after every step."""
    import gc

    import psutil

    from argusrl.observe.display import PlainDisplay

    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    process = psutil.Process()
    samples = (out / "samples.jsonl").open("a")

    class SamplingDisplay(PlainDisplay):
        def step(self, row: Any) -> None:
            super().step(row)
            peak = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
            gc.collect()
            sample = {
                "trajectories": row["step"] * options["step_trajectories"],
                "private_bytes": process.memory_full_info().uss,
                "blocks": sys.getallocatedblocks(),
                "peak_bytes": peak << 10,
                "step_seconds": row["time/step_seconds"],
            }
            samples.write(json.dumps(sample) + "\n")
            samples.flush()
            clear.write_text("5")  # the peak begins anew

    return SamplingDisplay()


def main() -> int:
    if sys.argv[1:2] == ["--supervise"]:
        return supervise()
    if sys.argv[1:2] == ["--drive"]:
        return drive(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("runs/driver-memory"))
    options = parser.parse_args()
    report = measure(options.out, options.trajectories)
    print(json.dumps(report, indent=1))
    within = report["driver_bytes_per_trajectory"] <= 200 and abs(report["driver_bytes_per_image"]) <= ROUNDING_BYTES
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
