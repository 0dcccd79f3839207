"""argusrl config check | explain | schema | difference."""

from __future__ import annotations

import json
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argusrl.cli.output import JsonOption, RootOption, say, say_json, say_table
from argusrl.errors import ConfigError

if TYPE_CHECKING:
    from argusrl.config.sections import Config

Recipe = Annotated[Path, typer.Argument(help="Recipe file (YAML).")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes, section.key=value.", metavar="[KEY=VALUE]...")]

app = typer.Typer(help="Check and explain recipes.", no_args_is_help=True)


def register(parent: typer.Typer) -> None:
    """Add the verb."""
    parent.add_typer(app, name="config")


@app.command()
def check(
    recipe: Recipe,
    overrides: Overrides = None,
    without_files: Annotated[
        bool, typer.Option("--without-files", help="Do not look for the files it names (they are elsewhere).")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Every mistake in a recipe at once; exit code 2 if there is one."""
    from argusrl.config.checks import file_problems
    from argusrl.config.load import load_config

    try:
        loaded = load_config(recipe, overrides or [])
        missing = [] if without_files else file_problems(loaded.config)
        if problems := [*missing, *_cluster_problems(loaded.config)]:
            raise ConfigError(problems, "--without-files leaves out files that are elsewhere" if missing else "")
    except ConfigError as error:
        if not as_json:
            raise
        say_json({"sound": False, "problems": error.problems})
        raise typer.Exit(error.exit_code) from None
    if as_json:
        config = loaded.config.model_dump(mode="json")
        say_json({"sound": True, "problems": [], "sha256": loaded.digest, "sources": loaded.sources, "config": config})
        return
    say(f"✓ {recipe} is sound", "green")
    say(f"  run {loaded.config.run.name}, {loaded.config.algorithm.num_steps} steps, model {loaded.config.model.path}")
    say(f"  sha256 {loaded.digest}")
    for source in loaded.sources[:-1]:
        say(f"  base   {source}")


def _cluster_problems(config: Config) -> list[str]:
    """Whether the nodes that it asks for have what it needs."""
    from argusrl.cluster.manifests.setup import setup_of

    if config.cluster.kubernetes is None:
        return []
    try:
        setup_of(config)
    except ConfigError as error:
        return error.problems
    return []


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="Key or section, e.g. algorithm.group_size; left out: all keys.")] = "",
    as_json: JsonOption = False,
) -> None:
    """What a key of a recipe means: type, default, allowed values."""
    from argusrl.config.explain import explain as explain_key
    from argusrl.config.explain import keys
    from argusrl.config.load import MAY_CHANGE_ON_RESUME

    found = explain_key(key) if key else list(keys())
    if as_json:
        say_json([asdict(help_) for help_ in found])
        return
    for number, help_ in enumerate(found):
        if number:
            say()
        default = "required" if help_.required else f"default {json.dumps(help_.default, ensure_ascii=False)}"
        say(help_.path, "cyan")
        say(f"  {help_.help}")
        say(f"  {help_.type}; {default}")
        if any(fnmatch(help_.path, pattern) for pattern in MAY_CHANGE_ON_RESUME):
            say("  may change when a run is resumed")


@app.command()
def schema() -> None:
    """JSON schema of a recipe, for editors."""
    from argusrl.config.explain import schema as schema_of

    say_json(schema_of())


@app.command()
def difference(
    old: Annotated[str, typer.Argument(help="Run (name or folder) or recipe.")],
    new: Annotated[str, typer.Argument(help="Run (name or folder) or recipe.")],
    root: RootOption = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """What differs between the configs of two runs or recipes."""
    from argusrl.config.load import MAY_CHANGE_ON_RESUME, config_difference

    before, after = _load(old, root), _load(new, root)
    if before.optimizer.schedule_steps is None:
        before = _with_schedule(before, after)
    elif after.optimizer.schedule_steps is None:
        after = _with_schedule(after, before)
    lines = config_difference(before, after)
    free = [any(fnmatch(line.partition(": ")[0], pattern) for pattern in MAY_CHANGE_ON_RESUME) for line in lines]
    if as_json:
        pairs = zip(lines, free, strict=True)
        say_json([{"difference": line, "may_change_on_resume": allowed} for line, allowed in pairs])
        return
    if not lines:
        say("no difference")
        return
    rows = [[line, "yes" if allowed else "no"] for line, allowed in zip(lines, free, strict=True)]
    say_table(["difference", "may change on resume"], rows)


def _load(text: str, root: Path) -> Config:
    from argusrl.cli.runs import find_run
    from argusrl.config.load import load_config, read_resolved

    if Path(text).is_file():
        path = Path(text)
        return read_resolved(path) if path.name == "config.yaml" else load_config(path).config
    return read_resolved(find_run(text, root).config)


def _with_schedule(config: Config, source: Config) -> Config:
    steps = source.optimizer.schedule_steps
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"schedule_steps": steps})})
