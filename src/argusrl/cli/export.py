"""`argusrl export`: a run's adapter as a PEFT folder, or merged into a whole model; checked by loading it back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from argusrl.cli.output import JsonOption, RootOption, say, say_json


def register(app: typer.Typer) -> None:
    @app.command("export")
    def export(
        target: Annotated[str, typer.Argument(metavar="RUN", help="Run: its name under --root, or its folder.")],
        to: Annotated[str, typer.Option("--to", help="Folder to write, which must not exist, or s3://bucket/prefix.")],
        merge: Annotated[bool, typer.Option("--merge", help="Write a whole model with the adapter merged in.")] = False,
        step: Annotated[str, typer.Option("--step", help="Which adapter: a step, last or best.")] = "last",
        root: RootOption = Path("runs"),
        as_json: JsonOption = False,
    ) -> None:
        """Write the adapter as a PEFT folder (or a merged model) and check it by loading it back."""
        report = run(target, to, merge, step, root)
        if as_json:
            say_json(report)
            return
        kind = "merged model" if merge else "PEFT folder"
        say(f"{kind} of step {report['step']} in {to} (adapter {report['adapter_sha256'][:12]})")
        say(f"loaded back: log-probabilities differ by at most {report['largest_difference']:.2g}")


def run(target: str, to: str, merge: bool, step: str, root: Path) -> dict[str, Any]:
    """Export and check; what was written. To S3 goes what was loaded back from a temporary folder."""
    from argusrl.storage.s3 import Place, client, copy_folder

    if not to.startswith("s3://"):
        return _export(target, Path(to), merge, step, root)
    place, s3 = Place.of(to), client()
    with tempfile.TemporaryDirectory(prefix="argusrl-export-") as scratch:
        report = _export(target, Path(scratch) / "export", merge, step, root)
        sent = copy_folder(s3, Path(scratch) / "export", place)
    return {**report, "path": str(place), "sent_bytes": sent}


def _export(target: str, to: Path, merge: bool, step: str, root: Path) -> dict[str, Any]:
    from argusrl.cli.runs import find_run
    from argusrl.config.load import read_resolved
    from argusrl.errors import ConfigError
    from argusrl.training.evaluation_file import choose_commit, require_adapter
    from argusrl.training.export import export_run

    folder = find_run(target, root)
    if to.exists():
        raise ConfigError(f"--to {to}: exists already", "name a folder that does not")
    commit = choose_commit(folder, step)
    require_adapter(folder, commit)
    return export_run(folder, read_resolved(folder.config), commit, to, merge=merge)
