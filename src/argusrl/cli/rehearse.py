"""`argusrl rehearse`: kill things on purpose in a short run of a recipe, and see whether it comes back the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argusrl.cli.output import JsonOption, say, say_json, say_table, standard_output_aside

if TYPE_CHECKING:
    from argusrl.config.sections import Config
    from argusrl.recovery.failpoints import Plan, Victim
    from argusrl.storage.layout import RunFolder

FAILED = 1  # exit code: the run came back, but not as it should


def register(app: typer.Typer) -> None:
    @app.command("rehearse")
    def rehearse(
        recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).")],
        overrides: Annotated[
            list[str] | None, typer.Argument(help="Changes to the recipe: section.key=value …")
        ] = None,
        faults: Annotated[
            str, typer.Option(help="What is killed, in turn: engine, rank, episode_worker, driver.")
        ] = "engine,rank,episode_worker,driver",
        shots: Annotated[int, typer.Option(min=1, help="How many kills.")] = 4,
        seed: Annotated[int, typer.Option(help="Draws the moments.")] = 0,
        as_json: JsonOption = False,
    ) -> None:
        """Run a few steps of a recipe twice, undisturbed and under kills, and compare.

        Both runs stay under run.root. Exit codes: 0 the run healed and ended as the undisturbed one (on GPU: soundly,
        because sampling there is equal in distribution only), 1 it did not, else those of `argusrl train`.
        """
        raise typer.Exit(run(recipe, overrides or [], _victims(faults), shots, seed, as_json=as_json))


def run(
    recipe: Path, overrides: Sequence[str], victims: Sequence[Victim], shots: int, seed: int, *, as_json: bool
) -> int:
    """Both runs, their comparison and the recovery report; the exit code."""
    from argusrl.config.checks import require
    from argusrl.config.load import load_config
    from argusrl.recovery.rehearse import draw_plan, rehearsed

    config = load_config(recipe, [*overrides, *(["observe.display=none"] if as_json else [])]).config
    require(config, files=True)
    name = f"{config.run.name}-rehearsal"
    folders = []
    for title, suffix, plan in (
        ("1 of 2: undisturbed", "-calm", None),
        (f"2 of 2: {shots} kills", "", draw_plan(victims, shots, seed)),
    ):
        _tell(f"Rehearsal {title}", as_json)
        folder, code = play(rehearsed(config, shots=shots, name=name + suffix), plan, quiet=as_json)
        if code == 75 or (code and plan is None):  # asked to stop, or the recipe does not even run by itself
            return code
        folders.append(folder)
    outcome = judge(*folders)
    if as_json:
        say_json(outcome)
    else:
        print_outcome(outcome)
    return 0 if outcome["passed"] else FAILED


def play(config: Config, plan: Plan | None, *, quiet: bool) -> tuple[RunFolder, int]:
    """One new run of `config` under its supervisor; its folder and exit code."""
    from argusrl.recovery.failpoints import write_plan
    from argusrl.recovery.resume import choose_run, create_run
    from argusrl.recovery.supervisor import supervise

    choice = choose_run(config, fresh=True)
    create_run(choice)
    if plan is not None:
        write_plan(choice.folder, plan)
    with standard_output_aside() if quiet else nullcontext():
        code = supervise(
            choice.folder, choice.config, say=lambda text: _tell(text, quiet), debug="ARGUSRL_DEBUG" in os.environ
        )
    return choice.folder, code


def judge(calm: RunFolder, shot: RunFolder) -> dict[str, Any]:
    """What `rehearse --json` prints."""
    from argusrl.journal.commits import CommitChain
    from argusrl.journal.verify import verify_run
    from argusrl.recovery.failpoints import fired_shots, read_plan
    from argusrl.recovery.rehearse import compare_runs
    from argusrl.recovery.report import recovery_report, summary

    comparison = compare_runs(calm, shot)
    undisturbed, report = recovery_report(calm), recovery_report(shot)
    problems = [f"{folder.name}: {problem}" for folder in (calm, shot) for problem in verify_run(folder)]
    plan = read_plan(shot)
    head, goal = CommitChain(shot).head(), CommitChain(calm).head()
    finished = head is not None and goal is not None and head.step == goal.step
    bitwise = head is None or head.conditions.get("device") != "cuda"
    figures = summary([report], undisturbed.cold_start_seconds)
    sound = finished and not problems and not report.trajectories_lost and not report.steps_lost
    return {
        "passed": sound and (comparison.equivalent == 1.0 or not bitwise),
        "equivalent": comparison.equivalent,
        "differences": list(comparison.differences),
        "sound": sound,
        "problems": problems,
        "shots": len(plan.shots) if plan else 0,
        "fired": len(fired_shots(shot, plan)) if plan else 0,
        **figures,
        "unique_goodput_undisturbed": undisturbed.goodput.share,
        "folders": {"undisturbed": str(calm.path), "under_fire": str(shot.path)},
        "timeline": [timeline_entry(fault) for fault in report.faults],
    }


def timeline_entry(fault: Any) -> dict[str, Any]:
    """One fault as JSON."""
    return {
        "kind": fault.kind,
        "member": fault.member,
        "how": fault.how,
        "point": fault.point,
        "decision": fault.decision,
        "detect_seconds": fault.detect_seconds,
        "recover_seconds": fault.recover_seconds,
    }


def print_outcome(outcome: Mapping[str, Any]) -> None:
    """The recovery report for people."""
    say()
    say("Recovery report", "cyan")
    rows = [
        [
            entry["member"],
            entry["how"],
            entry["point"] or "–",
            seconds(entry["detect_seconds"]),
            entry["decision"] or "with another fault",
            seconds(entry["recover_seconds"]),
        ]
        for entry in outcome["timeline"]
    ]
    say_table(["shot", "how", "at", "found after", "answer", "next commit after"], rows)
    say()
    for line in report_lines(outcome):
        say(line)
    for line in [*outcome["differences"], *outcome["problems"]]:
        say(f"  ✗ {line}", "red")
    say()
    if outcome["passed"]:
        same = outcome["equivalent"] == 1.0
        say(
            "✓ the run healed and ended "
            + ("bit for bit as the undisturbed one" if same else "soundly; on GPU sampling is equal in distribution"),
            "green",
        )
    else:
        say("✗ the run did not come back as it should", "red")
    for title, path in outcome["folders"].items():
        say(f"  {title.replace('_', ' ')}: {path}")


def report_lines(figures: Mapping[str, Any]) -> list[str]:
    """The figures of a recovery report, one line each."""
    rows = [
        ("finished trajectories lost", f"{figures['trajectories_lost']} ({figures['trajectories_kept']} taken over)"),
        ("committed steps lost", str(figures["steps_lost"])),
    ]
    if figures["tokens_salvaged"] is not None:
        rows.append(("unfinished tokens salvaged", f"{figures['tokens_salvaged']:.1%} (engine faults)"))
    cold = figures["cold_start_seconds"]
    for kind, one in figures["recover_seconds"].items():
        share = figures["recover_vs_cold_start"].get(kind)
        of_cold = f" = {share:.0%} of a cold start ({cold:.1f} s)" if share is not None else ""
        rows.append((f"{kind.replace('_', ' ')} to next commit", f"{one['median']:.1f} s{of_cold}"))
    goodput, calm = figures["unique_goodput"], figures.get("unique_goodput_undisturbed")
    if goodput is not None:
        beside = f" (undisturbed {calm:.1%})" if calm is not None else ""
        rows.append(("unique goodput", f"{goodput:.1%}{beside}"))
        spent = [f"{name} {value:.1f}" for name, value in figures["goodput_seconds"].items() if value >= 0.05]
        rows.append(("seconds held", ", ".join(spent)))
    if figures["durability_tax"]["seconds_per_step"] is not None:
        rows.append(("durability tax", f"{figures['durability_tax']['seconds_per_step']:.3f} s per step"))
    return [f"  {title:<34}{text}" for title, text in rows]


def seconds(value: float | None) -> str:
    """For a table cell."""
    return "–" if value is None else f"{value:.1f} s"


def _victims(text: str) -> list[Victim]:
    from argusrl.errors import ConfigError
    from argusrl.recovery.failpoints import VICTIMS

    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in VICTIMS]
    if unknown or not words:
        wrong = f"--faults {text}: unknown {', '.join(unknown) or 'list'}"
        raise ConfigError(wrong, f"choose from {', '.join(VICTIMS)}")
    return [victim for victim in VICTIMS if victim in words]


def _tell(text: str, quiet: bool) -> None:
    if quiet:
        typer.echo(text, err=True)
    else:
        say(text)
    sys.stdout.flush()
