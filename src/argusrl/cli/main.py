"""The `argusrl` command. Each verb is a file of this package with a function register(app); none is imported early.

Exit codes are those of errors.py; 2 is also a wrong command line, 130 is Ctrl-C, 1 anything unexpected.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from argusrl.cli.lazy import lazy_group

VERBS = {
    "plan": ("argusrl.cli.plan", "Memory, storage and seconds that a recipe will take, and whether it fits."),
    "train": ("argusrl.cli.train", "Train by a recipe, or go on with the run of that name."),
    "rehearse": ("argusrl.cli.rehearse", "Kill things on purpose in a short run, and see whether it comes back."),
    "evaluate": ("argusrl.cli.evaluate", "Held-out accuracy of a run's adapter against its base."),
    "export": ("argusrl.cli.export", "Write a run's adapter as a PEFT folder or a merged model."),
    "runs": ("argusrl.cli.runs", "List, show and verify runs; what they take, and tidying up."),
    "config": ("argusrl.cli.config", "Check and explain recipes."),
    "environment": ("argusrl.cli.environment", "Check an environment and its rewards before training."),
    "cluster": ("argusrl.cli.cluster", "Run on Kubernetes: render, submit, watch, heal and stop."),
    "rewards": ("argusrl.cli.rewards", "Apply changed rewards to journalled trajectories."),
    "drain": ("argusrl.cli.drain", "Leave a node in good order: what a pod's preStop hook runs."),
    "doctor": ("argusrl.cli.doctor", "Check this machine: what is missing, and how to fix it."),
}
"""Verb → module with register(app), and the line in --help. A new verb is one line here and one file."""


app = typer.Typer(cls=lazy_group(VERBS), no_args_is_help=True, pretty_exceptions_enable=False)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"argusrl {version('argusrl')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Reinforcement-learning post-training of vision-language models that heals itself."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. `--debug` may stand anywhere before `--`."""
    words = list(arguments)
    options = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in options
    if debug:
        words.remove("--debug")
        os.environ["ARGUSRL_DEBUG"] = "1"  # for the processes this one starts
    try:
        app(args=words, prog_name="argusrl")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _failed(error, words, debug)
    return 0


def _failed(error: Exception, words: Sequence[str], debug: bool) -> int:
    from argusrl.cli.output import say_error
    from argusrl.errors import ArgusError
    from argusrl.observe.redact import Redactor

    redactor = Redactor()
    text = redactor.text("".join(traceback.format_exception(error)))
    if debug:
        typer.echo(text, err=True)
    if isinstance(error, ArgusError):
        say_error(error)
        return error.exit_code
    with tempfile.NamedTemporaryFile("w", prefix="argusrl-", suffix=".log", delete=False, encoding="utf-8") as log:
        log.write(redactor.text(f"argusrl {' '.join(words)}\nPython {sys.version}\n\n{text}"))
    what = redactor.text(f"{type(error).__name__}: {error}".splitlines()[0])
    typer.echo(f"unexpected error: {what} (traceback: {Path(log.name)})", err=True)
    return ArgusError.exit_code


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
