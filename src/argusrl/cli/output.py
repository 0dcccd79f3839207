"""What verbs print: text for people, or JSON with --json. Secrets are masked on the way out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from argusrl.errors import ArgusError
from argusrl.observe.redact import Redactor

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
RootOption = Annotated[Path, typer.Option("--root", help="Folder that holds run folders.")]


def say(text: str = "", colour: str | None = None) -> None:
    """One line on standard output."""
    typer.secho(Redactor().text(text), fg=colour)


def say_json(value: Any) -> None:
    """A value as indented JSON on standard output."""
    typer.echo(json.dumps(Redactor().value(value), indent=2, ensure_ascii=False, default=_plain))


def say_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns under titles."""
    widths = [max(len(row[index]) for row in [titles, *rows]) for index in range(len(titles))]
    for number, row in enumerate([titles, *rows]):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        say(line, "bright_black" if number == 0 else None)


@contextmanager
def standard_output_aside() -> Iterator[None]:
    """While active, what this process and its children write to standard output goes to standard error."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def say_error(error: ArgusError) -> None:
    """Message and hint on standard error."""
    redactor = Redactor()
    mark = typer.style("error: ", fg="red", bold=True)
    lines = redactor.text(error.message or type(error).__name__).split("\n")
    if len(lines) > 1:
        typer.echo(f"{mark}{len(lines)} problems", err=True)
        for line in lines:
            typer.echo(f"  {line}", err=True)
    else:
        typer.echo(f"{mark}{lines[0]}", err=True)
    if error.hint:
        typer.secho(f"  → {redactor.text(error.hint)}", fg="cyan", err=True)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def is_terminal() -> bool:
    """Whether a person is watching standard output."""
    return sys.stdout.isatty()
