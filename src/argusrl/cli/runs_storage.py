"""argusrl runs du | gc: what the runs of a root take, and tidying up those that nobody drives."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argusrl.cli.output import JsonOption, RootOption, say, say_json, say_table
from argusrl.errors import ArgusError, ConfigError, FencedError
from argusrl.storage.free_space import byte_text
from argusrl.storage.layout import RunFolder

if TYPE_CHECKING:
    from argusrl.config.sections import Config
    from argusrl.journal.tidying import Rules

WhereArgument = Annotated[
    str | None, typer.Argument(help="A run (name or folder) or a run root; default is --root.", metavar="RUN|ROOT")
]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says against the recipe's own retention; None leaves it."""

    keep_checkpoints: int | None = None
    keep_adapters: int | None = None
    keep_trajectories: bool | None = None


_LEAST = Wishes(keep_checkpoints=1, keep_adapters=1, keep_trajectories=False)


def register(app: typer.Typer) -> None:
    """Add both sub-verbs."""
    app.command("du")(du)
    app.command("gc")(gc)


def du(where: WhereArgument = None, root: RootOption = Path("runs"), as_json: JsonOption = False) -> None:
    """Bytes and files of each run, by kind, and what `runs gc` could free of them."""
    found = [_used(folder) for folder in runs_at(where, root)]
    if as_json:
        say_json(found)
        return
    kinds = ("trajectories", "images", "adapters", "checkpoints", "logs")
    rows = []
    for run in found:
        sizes = run["kinds"]
        rest = run["bytes"] - sum(sizes[kind]["bytes"] for kind in kinds)
        cells = [byte_text(run["bytes"]), f"{run['files']:,}", *(byte_text(sizes[kind]["bytes"]) for kind in kinds)]
        rows.append([run["name"], *cells, byte_text(rest), _could(run["gc"]), _could(run["gc_least"])])
    say_table(["run", "bytes", "files", *kinds, "rest", "gc frees", "at most"], rows)
    everything = sum(run["bytes"] for run in found)
    count = f"{len(found)} run{'' if len(found) == 1 else 's'}"
    say(f"{count}, {byte_text(everything)} in {sum(run['files'] for run in found):,} files")
    say(f"gc frees: `argusrl runs gc`. At most: with {_words(_LEAST)}", "bright_black")


def gc(
    where: WhereArgument = None,
    root: RootOption = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, say what would go.")] = False,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Only runs without a sign of life for so long: 12h, 30d, 4w.")
    ] = None,
    keep_checkpoints: Annotated[
        int | None, typer.Option("--keep-checkpoints", min=1, help="Instead of the recipe's checkpoint.keep.")
    ] = None,
    keep_adapters: Annotated[
        int | None, typer.Option("--keep-adapters", min=1, help="Instead of the recipe's checkpoint.keep_adapters.")
    ] = None,
    keep_trajectories: Annotated[
        bool | None,
        typer.Option(
            "--keep-trajectories/--drop-trajectories", help="Instead of the recipe's checkpoint.keep_trajectories."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tidy up runs that nobody drives: leavings of what died, and what their retention lets go.

    Everything that verification, a restart or the best adapter needs stays, and every deletion of something committed
    leaves a record. A run that may be under way is left alone.
    """
    from argusrl.journal.tidying import tidy_root

    wishes = Wishes(keep_checkpoints, keep_adapters, keep_trajectories)
    oldest = None if older_than is None else time.time() - seconds_of(older_than)
    folders = runs_at(where, root)
    found = [_tidied(folder, wishes, oldest, dry_run=dry_run) for folder in folders]
    probes = sum(tidy_root(place, lambda _: not dry_run).bytes for place in {folder.path.parent for folder in folders})
    if as_json:
        say_json({"dry_run": dry_run, "runs": found, "probes_bytes": probes})
    else:
        verb = "would free" if dry_run else "freed"
        for run in found:
            what = f"left alone: {run['skipped']}" if run["skipped"] else f"{verb} {byte_text(run['bytes'])}"
            say(f"{run['name']}: {what}", "yellow" if run["skipped"] else None)
            for path in (*run["leavings"], *run["retired"]) if dry_run else ():
                say(f"  {path}", "bright_black")
        say(f"{verb} {byte_text(probes + sum(run['bytes'] for run in found))} in all", "green")
    if any(run["failed"] for run in found):
        raise typer.Exit(ArgusError.exit_code)


def runs_at(where: str | None, root: Path) -> list[RunFolder]:
    """The run that `where` names, or all runs of the root that it is. Raises ConfigError."""
    from argusrl.cli.runs import find_run, run_folders

    if where is None:
        if not root.is_dir():
            raise ConfigError(f"--root {root}: no such folder", "name the folder that holds run folders")
        return run_folders(root)
    is_run = any(RunFolder(path).config.is_file() for path in (root / where, Path(where)))
    if not is_run and Path(where).is_dir():
        return run_folders(Path(where))
    return [find_run(where, root)]


def seconds_of(text: str) -> float:
    """Of 90m, 12h, 30d, 4w. Raises ConfigError."""
    match = re.fullmatch(r"(\d+)([smhdw])", text)
    if match is None:
        raise ConfigError(f"--older-than {text}: not a duration", "write 12h, 30d or 4w")
    return int(match[1]) * _UNITS[match[2]]


def rules_for(folder: RunFolder, config: Config, wishes: Wishes) -> Rules:
    """What has to stay of a run: what its recipe says, where nothing else is wished."""
    from argusrl.journal.tidying import Rules
    from argusrl.recovery.resume import is_finished
    from argusrl.training.evaluation_file import BestAdapter

    section = config.checkpoint
    best = BestAdapter.of(folder, config.algorithm.num_steps)
    return Rules(
        keep_checkpoints=wishes.keep_checkpoints or section.keep,
        keep_adapters=max(wishes.keep_adapters or section.keep_adapters, 1 + config.rollout.staleness),
        keep_trajectories=section.keep_trajectories if wishes.keep_trajectories is None else wishes.keep_trajectories,
        protected_versions={0, best.step},
        finished=is_finished(folder, config),
    )


def _used(folder: RunFolder) -> dict[str, Any]:
    from argusrl.journal.usage import total, usage

    sizes = usage(folder)
    everything = total(sizes)
    return {
        "name": folder.name,
        "folder": str(folder.path),
        "bytes": everything.bytes,
        "files": everything.files,
        "kinds": {kind: asdict(size) for kind, size in sizes.items()},
        "gc": _freeable(folder, Wishes()),
        "gc_least": _freeable(folder, _LEAST),
    }


def _freeable(folder: RunFolder, wishes: Wishes) -> int | None:
    """Bytes that gc would free; None where it would leave the run alone."""
    found = _tidied(folder, wishes, None, dry_run=True)
    return None if found["skipped"] else int(found["bytes"])


def _tidied(folder: RunFolder, wishes: Wishes, oldest: float | None, *, dry_run: bool) -> dict[str, Any]:
    from argusrl.config.load import read_resolved
    from argusrl.journal.tidying import last_sign_of_life, tidy

    answer = {
        "name": folder.name,
        "bytes": 0,
        "files": 0,
        "leavings": [],
        "retired": [],
        "skipped": "",
        "failed": False,
    }
    try:
        if oldest is not None and last_sign_of_life(folder) > oldest:
            return {**answer, "skipped": "too young"}
        done = tidy(folder, rules_for(folder, read_resolved(folder.config), wishes), dry_run=dry_run)
    except FencedError:
        return {**answer, "skipped": "it is being driven"}
    except ArgusError as error:
        return {**answer, "skipped": error.message, "failed": True}
    return {**answer, **asdict(done.size), "leavings": done.leavings, "retired": done.retired}


def _could(count: int | None) -> str:
    return "–" if count is None else byte_text(count)


def _words(wishes: Wishes) -> str:
    return (
        f"--keep-checkpoints {wishes.keep_checkpoints} --keep-adapters {wishes.keep_adapters} "
        f"--{'keep' if wishes.keep_trajectories else 'drop'}-trajectories"
    )
