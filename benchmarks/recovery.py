"""Shoot at runs of a small recipe, many times, and compare each with the undisturbed run: prints the figures as JSON.

    python benchmarks/recovery.py [--shots 50] [--seed 0] [--out runs/recovery] [--recipe RECIPE] [changes to it]

Every run takes --steps steps, and a shot in every second one (--spacing): engine, rank, episode worker and driver in
turn, at every named point, killed (or now and then stopped, so that only a deadline finds it), plus second faults
during the recovery from a first one. Runs alternate between one slot and two. The corpus is resumable: what lies
finished under --out is not repeated, and an interrupted run goes on. Exit code 0 if every step of every run has the
digests of the undisturbed run, the checker finds nothing, and nothing finished was lost.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from argusrl.cli.output import standard_output_aside
from argusrl.config.load import load_config
from argusrl.config.sections import Config
from argusrl.errors import Interrupted
from argusrl.journal.verify import verify_run
from argusrl.recovery.failpoints import STEP_POINTS, VICTIMS, How, Plan, read_plan, write_plan
from argusrl.recovery.rehearse import DELAYS_SECONDS, FIRST_STEP, compare_runs, draw_plan
from argusrl.recovery.report import recovery_report, summary
from argusrl.recovery.resume import choose_run, create_run, is_finished
from argusrl.recovery.supervisor import supervise
from argusrl.storage.layout import RunFolder

SECOND_FAULTS = 2  # per run, while shots are close to each other
POINTS = (*STEP_POINTS, "evaluating")
HOWS: tuple[How, ...] = ("kill", "kill", "kill", "stop")
OVERRIDES = [
    "algorithm.prompts_per_step=8",
    "data.heldout_size=16",
    "evaluate.every_steps=3",
    "evaluate.prompts=4",
    "observe.tensorboard=false",
    "observe.display=none",
    "recovery.hang_seconds=8",  # a stopped worker is found after this long
    "recovery.driver_silence_seconds=12",
]


def finished_run(
    recipe: Path, out: Path, name: str, slots: int, overrides: Sequence[str], plan: Plan | None
) -> RunFolder | None:
    """The folder of a run that has ended, played now if it had not; None if it failed. Raises Interrupted."""
    place = [f"run.root={out}", f"run.name={name}", f"cluster.slots={slots}"]
    config: Config = load_config(recipe, [*OVERRIDES, *place, *overrides]).config
    folder = RunFolder(out.absolute() / name)
    if folder.config.exists() and is_finished(folder, config):
        return folder
    choice = choose_run(config)
    if choice.action == "new":
        create_run(choice)
        if plan is not None and read_plan(choice.folder) is None:
            write_plan(choice.folder, plan)
    print(choice.message, file=sys.stderr, flush=True)
    with standard_output_aside():
        code = supervise(choice.folder, choice.config, say=lambda text: print(text, flush=True))
    if code == Interrupted.exit_code:
        raise Interrupted(f"{name} was interrupted", "the same command goes on with it")
    return choice.folder if code == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.yaml"))
    parser.add_argument("--shots", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=18, help="of each run")
    parser.add_argument("--spacing", type=int, default=2, help="steps from one shot to the next")
    parser.add_argument("--victims", nargs="+", default=list(VICTIMS), choices=VICTIMS)
    parser.add_argument("--points", nargs="+", default=list(POINTS), choices=POINTS)
    parser.add_argument("--delays", type=float, nargs="+", help="seconds from a point to its shot; drawn from these")
    parser.add_argument("--kills-only", action="store_true", help="SIGKILL always")
    parser.add_argument("--out", type=Path, default=Path("runs/recovery"))
    parser.add_argument("overrides", nargs="*", help="changes to the recipe")
    options = parser.parse_args()
    overrides = [f"algorithm.num_steps={options.steps}", *options.overrides]
    first_faults = (options.steps - FIRST_STEP) // options.spacing
    second_faults = SECOND_FAULTS if options.spacing <= 2 else 0
    runs = -(-options.shots // (first_faults + second_faults))
    calm: dict[int, RunFolder] = {}
    reports, calm_reports, problems, differences = [], [], [], []
    steps = equal = fired = 0
    for number in range(runs):
        slots = options.slots[number % len(options.slots)]
        if slots not in calm:
            undisturbed = finished_run(options.recipe, options.out, f"calm-{slots}", slots, overrides, None)
            if undisturbed is None:
                return 1
            calm[slots] = undisturbed
            calm_reports.append(recovery_report(undisturbed))
        plan = draw_plan(
            options.victims,
            first_faults,
            options.seed * 1000 + number,
            hows=("kill",) if options.kills_only else HOWS,
            points=options.points,
            delays_seconds=options.delays or DELAYS_SECONDS,
            second_faults=second_faults,
            spacing=options.spacing,
        )
        name = f"shot-{options.seed}-{number}"
        folder = finished_run(options.recipe, options.out, name, slots, overrides, plan)
        if folder is None:
            problems.append(f"{name} did not complete")
            continue
        comparison = compare_runs(calm[slots], folder)
        steps, equal = steps + comparison.steps, equal + comparison.equal
        differences += [f"{name}: {difference}" for difference in comparison.differences]
        problems += [f"{name}: {problem}" for problem in verify_run(folder)]
        fired += len(list(folder.rehearsal.glob("*.json")))
        reports.append(recovery_report(folder))
    figures = summary(reports, calm_reports[0].cold_start_seconds)
    report = {
        "runs": runs,
        "shots": runs * (first_faults + second_faults),
        "fired": fired,
        "equivalent": equal / steps if steps else 0.0,
        "differences": differences,
        "problems": problems,
        **figures,
        "unique_goodput_undisturbed": summary(calm_reports)["unique_goodput"],
    }
    print(json.dumps(report, indent=1))
    sound = not problems and not differences and not figures["trajectories_lost"] and not figures["steps_lost"]
    return 0 if sound and steps else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Interrupted as stopped:
        print(stopped.message, file=sys.stderr)
        sys.exit(stopped.exit_code)
