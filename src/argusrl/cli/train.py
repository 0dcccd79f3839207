"""`argusrl train`: a new run, or the unfinished one of that name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    @app.command("train")
    def train(
        recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).")],
        overrides: Annotated[
            list[str] | None, typer.Argument(help="Changes to the recipe: section.key=value …")
        ] = None,
        fresh: Annotated[bool, typer.Option("--fresh", help="Start over under a new name; deletes nothing.")] = False,
        fork: Annotated[
            str | None,
            typer.Option("--from", metavar="RUN@STEP", help="Start a new run from a committed step of another."),
        ] = None,
    ) -> None:
        """Train by a recipe, or go on with the unfinished run of that name.

        Exit codes: 0 complete, 75 interrupted (the same command resumes), 2 recipe, 3 data, 4 model, 5 storage,
        6 corruption, 7 cluster, 8 another driver owns the run, 9 worker, 10 numbers, 11 deadline.
        """
        raise typer.Exit(run(recipe, overrides or [], fresh=fresh, fork=fork))


def run(recipe: Path, overrides: list[str], *, fresh: bool, fork: str | None) -> int:
    """Check the recipe, choose the run folder, and supervise drivers until the run ends; the exit code."""
    from argusrl.cli.output import say
    from argusrl.cluster.names import RUN_FOLDER_VARIABLE
    from argusrl.cluster.plan.prediction import require_fit
    from argusrl.config.checks import require
    from argusrl.config.load import load_config
    from argusrl.recovery.fork import forked
    from argusrl.recovery.resume import choose_run, create_run
    from argusrl.recovery.supervisor import supervise

    config = load_config(recipe, overrides).config
    require(config, files=True)
    for warning in require_fit(config):
        say(warning, "yellow")
    origin: dict[str, Any] | None = None
    if fork is not None:
        config, origin = forked(config, fork)
    choice = choose_run(config, fresh=fresh, fork=origin)
    own = os.environ.get(RUN_FOLDER_VARIABLE)  # in a pod: of this run, and of no other
    if own and Path(own).name != choice.folder.name:
        say(f"{own} is complete: nothing is left to do")
        return 0
    if choice.action == "new":
        create_run(choice, origin)
    say(choice.message)
    return supervise(choice.folder, choice.config, say=say, debug="ARGUSRL_DEBUG" in os.environ)
