"""argusrl config check | estimate | explain | schema | difference."""

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
        problems = [] if without_files else file_problems(loaded.config)
        if problems:
            raise ConfigError(problems)
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


@app.command()
def estimate(
    recipe: Recipe,
    overrides: Overrides = None,
    gpu_gib: Annotated[
        float | None, typer.Option("--gpu-gib", help="Memory of one GPU in GiB, to see whether the recipe fits.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Ranks that share the weights; default is those of cluster.slots, or 1."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Memory of one rank and one engine, line by line, from the model's config.json alone."""
    from argusrl.config.bundles import split
    from argusrl.config.estimate import estimate as estimate_of
    from argusrl.config.load import load_config
    from argusrl.config.model_shape import ModelShape

    config = load_config(recipe, overrides or []).config
    device = (
        "cpu" if config.cluster.device == "cpu" or (config.cluster.device == "auto" and gpu_gib is None) else "cuda"
    )
    found = estimate_of(
        config,
        ModelShape.find(config.model.path, config.model.revision),
        device=device,
        ranks=ranks or max(1, split(config.cluster, config.cluster.slots or 1)[0]),
        device_bytes=None if gpu_gib is None else int(gpu_gib * 2**30),
    ).to_json()
    if as_json:
        say_json({"device": device, **found})
        return
    for part in ("training", "engine"):
        lines = {name: size for name, size in found[part].items() if isinstance(size, int) and size}
        phases = {f"  while in {name}": size for name, size in found[part].get("phases", {}).items()}
        total = lines.pop("total")
        tokens, token_bytes = lines.pop("cache_tokens", 0), lines.pop("cache_token_bytes", 0)
        rows = [[name, _gib(size)] for name, size in {**lines, **phases, "total": total}.items()]
        say_table([f"{part} on {device}", "GiB"], rows)
        if token_bytes:
            say(f"a token of KV cache takes {token_bytes:,} bytes" + (f": {tokens:,} tokens fit" if tokens else ""))
        say()
    sizes = found["micro_batch"]
    say(f"at a micro-batch of {sizes['tokens']:,} tokens with {sizes['patches']:,} image patches")
    if found["fits"] is not None:
        say("it fits" if found["fits"] else "it does not fit", "green" if found["fits"] else "red")


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


def _gib(size: int) -> str:
    return f"{size / 2**30:,.3f}"


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
