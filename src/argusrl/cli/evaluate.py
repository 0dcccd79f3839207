"""`argusrl evaluate`: held-out accuracy of a run's adapter against its base, or of any model."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from argusrl.cli.output import JsonOption, RootOption, say, say_json, say_table


def register(app: typer.Typer) -> None:
    @app.command("evaluate")
    def evaluate(
        target: Annotated[
            str, typer.Argument(metavar="RUN|MODEL", help="Run (name or folder), or a model with --recipe.")
        ],
        overrides: Annotated[list[str] | None, typer.Argument(help="Changes: section.key=value …")] = None,
        recipe: Annotated[
            Path | None, typer.Option("--recipe", help="Evaluate MODEL on this recipe's held-out set.")
        ] = None,
        step: Annotated[str, typer.Option("--step", help="Which adapter of the run: a step, last or best.")] = "last",
        root: RootOption = Path("runs"),
        as_json: JsonOption = False,
    ) -> None:
        """Held-out accuracy, greedy and sampled, with 95 % intervals: base model against adapter."""
        report = run(target, overrides or [], recipe, step, root, quiet=as_json)
        if as_json:
            say_json(report)
        else:
            _show(report)


def run(
    target: str, overrides: list[str], recipe: Path | None, step: str, root: Path, *, quiet: bool
) -> dict[str, Any]:
    """Find out what to evaluate, and do it."""
    from argusrl.cli.runs import find_run
    from argusrl.config.checks import require
    from argusrl.config.load import load_config, read_resolved, with_overrides
    from argusrl.storage.layout import RunFolder
    from argusrl.training.driver import ray_environment
    from argusrl.training.evaluation_file import choose_commit, require_adapter

    if recipe is not None:
        config = load_config(recipe, [f"model.path={target}", *overrides]).config
        folder, adapter = RunFolder(Path(tempfile.gettempdir())), None
    else:
        folder = find_run(target, root)
        config = with_overrides(read_resolved(folder.config), overrides)
        commit = choose_commit(folder, step)
        require_adapter(folder, commit)
        adapter = commit.adapter
    require(config, files=True)
    os.environ.update(ray_environment(config))
    from argusrl.training.evaluate_command import EvaluationJob, run_evaluation  # imports Ray

    with tempfile.TemporaryDirectory(prefix="argusrl-evaluate-") as logs:
        job = EvaluationJob(config=config, folder=folder, adapter=adapter, logs=Path(logs))
        return {"target": target, **run_evaluation(job, _quiet if quiet else say)}


def _quiet(text: str) -> None:
    """JSON on standard output stays alone."""


def _show(report: dict[str, Any]) -> None:
    rows = []
    for name in ("base", "adapter"):
        for how in ("greedy", "sampled"):
            if name in report:
                one = report[name][how]
                interval = f"{one['low']:.3f} – {one['high']:.3f}"
                rows.append([name, how, f"{one['accuracy']:.3f}", interval, f"{one['successes']}/{one['count']}"])
    say_table(["model", "replies", "accuracy", "95 % interval", "solved"], rows)
