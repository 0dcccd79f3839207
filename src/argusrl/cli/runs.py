"""argusrl runs list | show | verify (du and gc are in runs_storage.py), and how every verb finds a run."""

from __future__ import annotations

import difflib
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argusrl.cli import runs_storage
from argusrl.cli.output import JsonOption, RootOption, say, say_json, say_table
from argusrl.errors import ArgusError, ConfigError, CorruptionError
from argusrl.storage.layout import RunFolder

if TYPE_CHECKING:
    from argusrl.config.sections import Config
    from argusrl.journal.commits import Commit

RunArgument = Annotated[str, typer.Argument(help="Run: its name under --root, or its folder.", metavar="RUN")]

FAULT_WORDS = (
    *("fault", "shot", "failed", "killed", "died", "hung", "paused", "restart", "rebuilt", "damaged"),
    "replay_inexact",
)
"""An event whose kind holds one of these words is a fault or the answer to one."""

_ALIVE_SECONDS = 120.0  # a heartbeat this young without a verdict is a run under way

app = typer.Typer(help="List, show and verify runs; what they take, and tidying up.", no_args_is_help=True)
runs_storage.register(app)


def register(parent: typer.Typer) -> None:
    """Add the verb."""
    parent.add_typer(app, name="runs")


def find_run(text: str, root: Path) -> RunFolder:
    """The folder of a run given by name or path. Raises ConfigError with names that look alike."""
    for path in (root / text, Path(text)):
        if RunFolder(path).config.is_file():
            return RunFolder(path.absolute())
    names = [folder.name for folder in run_folders(root)]
    close = difflib.get_close_matches(text, names, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"runs under {root}: {', '.join(names) or 'none'}"
    raise ConfigError(f"no such run: {text}", hint)


def run_folders(root: Path) -> list[RunFolder]:
    """All runs under a root."""
    if not root.is_dir():
        return []
    found = [RunFolder(path.absolute()) for path in sorted(root.iterdir())]
    return [folder for folder in found if folder.config.is_file()]


@app.command("list")
def list_(root: RootOption = Path("runs"), as_json: JsonOption = False) -> None:
    """All runs under a root: how far they are and how they stand."""
    runs = [_brief(folder) for folder in run_folders(root)]
    if as_json:
        say_json(runs)
    elif not runs:
        say(f"no runs under {root}")
    else:
        titles = ["run", "steps", "reward", "accuracy", "state"]
        rows = [
            [run["name"], f"{run['steps']}/{run['total']}", _cell(run["reward"]), _cell(run["accuracy"]), run["state"]]
            for run in runs
        ]
        say_table(titles, rows)


@app.command()
def show(run: RunArgument, root: RootOption = Path("runs"), as_json: JsonOption = False) -> None:
    """One run: steps, attempts, faults and what was done about them, time lost, adapter, seconds by phase."""
    from argusrl.cli.rehearse import report_lines
    from argusrl.observe.display import duration
    from argusrl.recovery.goodput import LOST

    summary = summarise(find_run(run, root))
    if as_json:
        say_json(summary)
        return
    adapter = summary["adapter"]
    say(summary["name"], "cyan")
    say(f"  state     {summary['state']}")
    say(f"  steps     {summary['steps']} of {summary['total']}")
    say(
        f"  adapter   v{adapter['version']} {adapter['sha256'][:16]}  {adapter['path']}" if adapter else "  adapter   –"
    )
    phases = ", ".join(f"{name} {duration(seconds)}" for name, seconds in summary["seconds_by_phase"].items())
    say(f"  time      {phases or '–'}")
    for evaluation in summary["evaluations"]:
        say(f"  held out  after step {evaluation['step']}: {_accuracies(evaluation)}")
    for attempt in summary["attempts"]:
        say(f"  attempt   {attempt['attempt']}: {attempt['outcome']} {attempt['reason']}".rstrip())
    for fault in summary["faults"]:
        decision = f" → {fault['decision']}" if fault.get("decision") else ""
        say(f"  fault     {fault.get('time', '')} {fault.get('kind', '')}: {fault.get('message', '')}{decision}")
    recovery = summary["recovery"]
    if summary["faults"] and recovery["unique_goodput"] is not None:
        lost = {name: recovery["goodput_seconds"][name] for name in LOST}
        parts = ", ".join(f"{name} {duration(value)}" for name, value in lost.items() if value >= 0.05)
        say(f"  lost      {duration(sum(lost.values()))} to faults{f' ({parts})' if parts else ''}")
        for line in report_lines(recovery):
            say(line)


@app.command()
def verify(run: RunArgument, root: RootOption = Path("runs"), as_json: JsonOption = False) -> None:
    """Check every invariant of a run folder from the bytes on disk; exit code 6 with the list of what is broken."""
    from argusrl.journal.verify import verify_run

    folder = find_run(run, root)
    problems = verify_run(folder)
    if as_json:
        say_json({"name": folder.name, "sound": not problems, "problems": problems})
    elif problems:
        say(f"✗ {folder.path}: {len(problems)} broken", "red")
        for problem in problems:
            say(f"  {problem}")
    else:
        say(f"✓ {folder.path} is sound", "green")
    if problems:
        raise typer.Exit(CorruptionError.exit_code)


def summarise(folder: RunFolder) -> dict[str, Any]:
    """What `runs show --json` prints. Raises CorruptionError, ConfigError."""
    from argusrl.config.load import read_resolved
    from argusrl.journal.commits import CommitChain
    from argusrl.observe.events import read_events
    from argusrl.recovery.report import recovery_report, summary
    from argusrl.training.evaluation_file import read_evaluations

    config = read_resolved(folder.config)
    chain = CommitChain(folder)
    head = chain.head()
    attempts = _attempts(folder)
    seconds: dict[str, float] = defaultdict(float)
    for step in range(1, (head.step if head else 0) + 1):
        for name, value in chain.read(step).metrics.items():
            if name.startswith("time/") and name != "time/step_seconds" and isinstance(value, (int, float)):
                seconds[name.removeprefix("time/").removesuffix("_seconds")] += value
    evaluations = read_evaluations(folder, head.step if head else 0)
    events = read_events(folder.events)
    return {
        "name": folder.name,
        "folder": str(folder.path),
        "steps": head.step if head else 0,
        "total": config.algorithm.num_steps,
        "finished": _finished(folder, config),
        "state": _state(folder, config, attempts),
        "attempts": attempts,
        "heartbeat": _heartbeat(folder, attempts),
        "submissions": _submissions(folder),
        "faults": [*_failed_attempts(attempts), *(event for event in events if _is_fault(event))],
        "recovery": summary([recovery_report(folder)]),
        "adapter": _adapter(head),
        "seconds_by_phase": {name: round(value, 3) for name, value in seconds.items()},
        "evaluations": [
            {name: record[name] for name in ("step", "greedy", "sampled") if name in record} for record in evaluations
        ],
    }


def _brief(folder: RunFolder) -> dict[str, Any]:
    from argusrl.config.load import read_resolved
    from argusrl.storage.publish import read_lines

    try:
        config = read_resolved(folder.config)
        rows = read_lines(folder.metrics)
        state = _state(folder, config, _attempts(folder))
    except ArgusError as error:
        problem = f"damaged: {error.message}"
        return {"name": folder.name, "steps": 0, "total": 0, "reward": None, "accuracy": None, "state": problem}
    return {
        "name": folder.name,
        "steps": max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=0),
        "total": config.algorithm.num_steps,
        "reward": _newest(rows, "reward/mean"),
        "accuracy": _newest(rows, "evaluate/sampled/accuracy"),
        "state": state,
    }


def _newest(rows: list[dict[str, Any]], name: str) -> Any:
    return next((row[name] for row in reversed(rows) if row.get(name) is not None), None)


def _adapter(head: Commit | None) -> dict[str, Any] | None:
    if head is None:
        return None
    return {"version": head.adapter.version, "sha256": head.adapter.sha256, "path": head.adapter.path}


def _attempts(folder: RunFolder) -> list[dict[str, Any]]:
    from argusrl.journal.attempts import newest_attempt, read_verdict

    attempts = []
    for number in range(1, newest_attempt(folder) + 1):
        verdict = read_verdict(folder, number)
        attempts.append(
            {
                "attempt": number,
                "outcome": verdict.outcome if verdict else None,
                "exit_code": verdict.exit_code if verdict else None,
                "reason": verdict.reason if verdict else "",
                "step": verdict.step if verdict else None,
            }
        )
    return attempts


def _heartbeat(folder: RunFolder, attempts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The newest attempt's, while it has no verdict."""
    from argusrl.journal.attempts import read_heartbeat

    if not attempts or attempts[-1]["outcome"] is not None:
        return None
    beat = read_heartbeat(folder, attempts[-1]["attempt"])
    if beat is None:
        return None
    age_seconds = round(max(0.0, time.time() - beat.time), 1)
    return {"age_seconds": age_seconds, "phase": beat.phase, "step": beat.step, "host": beat.host}


def _submissions(folder: RunFolder) -> list[dict[str, Any]]:
    """Each time that the run was given to a cluster: why, and why none followed."""
    from argusrl.journal.submissions import read_end, submissions

    found = []
    for one in submissions(folder):
        end = read_end(folder, one.number)
        ended = {"outcome": end.outcome, "text": end.text} if end is not None else None
        found.append({"number": one.number, "name": one.name, "reason": one.reason, "text": one.text, "end": ended})
    return found


def _failed_attempts(attempts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"kind": f"attempt_{attempt['outcome']}", "message": attempt["reason"], "attempt": attempt["attempt"]}
        for attempt in attempts
        if attempt["outcome"] not in (None, "complete", "interrupted")
    ]


def _is_fault(event: dict[str, Any]) -> bool:
    return any(word in str(event.get("kind", "")) for word in FAULT_WORDS)


def _finished(folder: RunFolder, config: Config) -> bool:
    from argusrl.recovery.resume import is_finished

    return is_finished(folder, config)


def _state(folder: RunFolder, config: Config, attempts: list[dict[str, Any]]) -> str:
    """finished | running | interrupted | failed | …: the outcome of the newest attempt, in one word."""
    from argusrl.journal.attempts import read_heartbeat

    if _finished(folder, config):
        return "finished"
    if not attempts:
        return "not started"
    newest = attempts[-1]
    if newest["outcome"] is not None:
        return "can go on" if newest["outcome"] == "complete" else str(newest["outcome"])
    heartbeat = read_heartbeat(folder, newest["attempt"])
    if heartbeat is not None and time.time() - heartbeat.time < _ALIVE_SECONDS:
        return f"running ({heartbeat.phase})"
    return "interrupted"


def _accuracies(evaluation: dict[str, Any]) -> str:
    parts = []
    for mode in ("greedy", "sampled"):
        if found := evaluation.get(mode):
            interval = f"{found['low']:.3f}–{found['high']:.3f}"
            parts.append(f"{mode} {found['accuracy']:.3f} ({interval}, n = {found['count']})")
    return ", ".join(parts)


def _cell(value: Any) -> str:
    from argusrl.observe.display import number

    return number(value)
