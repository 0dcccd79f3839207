"""argusrl cluster manifest: the Kubernetes objects of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argusrl.cli.cluster.options import ContextOption, open_kube, write_objects

if TYPE_CHECKING:
    from argusrl.cluster.kube import Kube
    from argusrl.config.sections import Config


def register(app: typer.Typer) -> None:
    """Add the sub-verb."""

    @app.command("manifest")
    def manifest(
        recipe: Annotated[Path | None, typer.Argument(help="Recipe (YAML) with a section cluster.kubernetes.")] = None,
        overrides: Annotated[
            list[str] | None, typer.Argument(help="Changes to the recipe: section.key=value …")
        ] = None,
        output: Annotated[str, typer.Option("--output", help="File for the YAML, or - for standard output.")] = "-",
        submission: Annotated[
            int, typer.Option("--submission", min=1, help="Which submission of the run: part of the job's name.")
        ] = 1,
        validate: Annotated[
            bool, typer.Option("--validate", help="Check the objects, without a cluster, before they are written.")
        ] = False,
        live: Annotated[
            bool, typer.Option("--live", help="Have the cluster check them, too (a dry run; nothing is created).")
        ] = False,
        check: Annotated[
            Path | None, typer.Option("--check", help="Check this YAML file instead of rendering a recipe.")
        ] = None,
        context: ContextOption = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of YAML.")] = False,
    ) -> None:
        """Kubernetes objects of a run, as YAML; or check such a file.

        Plain objects to read, compare and `kubectl apply -f`; the same recipe gives the same bytes.
        """
        if check is not None:
            _check_file(check, _cluster(live, context), as_json=as_json)
        else:
            _render(
                recipe,
                overrides or [],
                output,
                submission,
                validate=validate,
                kube=_cluster(live, context),
                as_json=as_json,
            )


def _render(
    recipe: Path | None,
    overrides: list[str],
    output: str,
    submission: int,
    *,
    validate: bool,
    kube: Kube | None,
    as_json: bool,
) -> None:
    from argusrl.cli.output import say_json
    from argusrl.cluster.manifests.render import render
    from argusrl.config.load import load_config
    from argusrl.errors import ConfigError

    if recipe is None:
        raise ConfigError("which recipe?", "argusrl cluster manifest RECIPE, or --check FILE")
    config = load_config(recipe, overrides).config
    documents = render(config, submission)
    values = [document.value for document in documents]
    if validate or kube is not None:
        _require_valid(values, kube)
        _say_fit(config)
    if as_json:
        say_json(values)
    else:
        write_objects(documents, output)


def _say_fit(config: Config) -> None:
    """On standard error: objects may be right, and their run not fit its nodes. `submit` refuses it."""
    from argusrl.cluster.plan.prediction import require_fit
    from argusrl.errors import ConfigError

    try:
        notes = require_fit(config)
    except ConfigError as error:
        notes = [*error.problems, f"→ {error.hint}"]
    for note in notes:
        typer.secho(note, fg="yellow", err=True)


def _check_file(path: Path, kube: Kube | None, *, as_json: bool) -> None:
    from argusrl.cli.output import say, say_json
    from argusrl.cluster.manifests.check import read_documents, unchecked

    documents = read_documents(path)
    if as_json:
        problems = _problems(documents, kube)
        notes = list(filter(None, map(unchecked, documents)))
        say_json({"file": str(path), "valid": not problems, "problems": problems, "notes": notes})
        if problems:
            raise typer.Exit(2)
        return
    _require_valid(documents, kube)
    notes = list(filter(None, map(unchecked, documents)))
    for note in notes:
        say(f"– {note}", "yellow")
    checked = len(documents) - len(notes)
    if checked:
        say(f"✓ {path}: {checked} {'object is' if checked == 1 else 'objects are'} valid", "green")


def _cluster(live: bool, context: str | None) -> Kube | None:
    return open_kube(context, None) if live else None


def _require_valid(documents: list[dict[str, Any]], kube: Kube | None) -> None:
    from argusrl.errors import ConfigError

    if problems := _problems(documents, kube):
        raise ConfigError(problems)


def _problems(documents: list[dict[str, Any]], kube: Kube | None) -> list[str]:
    from argusrl.cluster.manifests.check import problems_of

    problems = [problem for document in documents for problem in problems_of(document)]
    if kube is not None:
        from argusrl.cluster.manifests.live import live_problems

        problems += live_problems(documents, kube)
    return problems
