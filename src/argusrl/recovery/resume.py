"""Which run folder a `train` command means: a new one, or one to go on with. Resuming is the default."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from argusrl.config.load import config_difference, pinned, read_resolved, resumed, write_resolved
from argusrl.config.sections import Config
from argusrl.errors import ConfigError, CorruptionError
from argusrl.journal.attempts import Verdict, newest_attempt, read_verdict
from argusrl.recovery.supervisor import count_commits
from argusrl.storage.filesystem import refuse_object_store
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import make_folder, replace_file

FORK_FILE = "fork.json"  # in the run folder: where a forked run comes from


@dataclass(frozen=True, slots=True)
class RunChoice:
    """What to do, in which folder, under which resolved config."""

    action: Literal["new", "resume"]
    folder: RunFolder
    config: Config
    message: str  # for people


def choose_run(config: Config, *, fresh: bool = False, fork: dict[str, Any] | None = None) -> RunChoice:
    """Resume the unfinished run of this name and config, or pick a new name when it is finished or `fresh`.

    With `fork` only a fork of the same origin under the same config is resumed; else the fork is new. Raises
    ConfigError with the difference when the folder holds an unfinished run of another config.
    """
    name = config.run.name
    assert name is not None  # the loader fills it
    for number in range(1, 10_000):
        folder = RunFolder(Path(config.run.root).absolute() / (name if number == 1 else f"{name}-{number}"))
        named = config.model_copy(update={"run": config.run.model_copy(update={"name": folder.name})})
        if not folder.config.exists():
            _require_empty(folder)
            return RunChoice("new", folder, pinned(named), f"New run {folder.path}")
        if fresh:
            continue
        _require_root(folder)
        if not folder.commit(0).exists() and not _under_way(folder):  # what failed before anything counted binds nobody
            return RunChoice("new", folder, pinned(named), f"New run {folder.path} (nothing was committed there yet)")
        other_line = read_fork(folder) != fork and (number > 1 or fork is not None)
        if other_line or is_finished(folder, named):
            continue
        recorded = read_resolved(folder.config)
        try:
            wanted = resumed(recorded, named)
        except ConfigError:
            if fork is None:
                raise
            continue
        message = f"Resuming {folder.path} after step {count_commits(folder)} of {wanted.algorithm.num_steps}"
        return RunChoice("resume", folder, wanted, "; ".join([message, *config_difference(recorded, wanted)]))
    raise ConfigError(f"more than 9,999 runs are named {name}", "give another run.name")


def is_finished(folder: RunFolder, config: Config) -> bool:
    """All steps of `config` are committed and the attempt that did it said so, or it stopped early by its own rule."""
    last = last_verdict(folder)
    if last is None or not last.complete:
        return False
    return bool(last.details.get("stopped_early")) or count_commits(folder) >= config.algorithm.num_steps


def _require_empty(folder: RunFolder) -> None:
    """Raises CorruptionError for a folder with commits but no config: another one would be written over it."""
    if folder.commits.is_dir() and any(folder.commits.iterdir()):
        raise CorruptionError(
            f"{folder.config} is missing, but {folder.commits} holds commits of this run",
            f"restore it from a copy in {folder.attempts}/*/config.yaml, or start over under another run.name",
        )


def _require_root(folder: RunFolder) -> None:
    """A checkpoint is written after commit 0 only: one without it means that commits were lost, not that none was made.

    Raises CorruptionError: going on would overwrite the config and begin a second history.
    """
    if not folder.commit(0).exists() and folder.checkpoints.is_dir() and any(folder.checkpoints.iterdir()):
        raise CorruptionError(
            f"{folder.commit(0)} is missing, but {folder.checkpoints} holds checkpoints of this run",
            "restore the commits from a copy, or start over under a new name with --fresh",
        )


def _under_way(folder: RunFolder) -> bool:
    """Whether the newest attempt has no verdict: it may still be starting, so its config must stay."""
    newest = newest_attempt(folder)
    return newest > 0 and read_verdict(folder, newest) is None


def last_verdict(folder: RunFolder) -> Verdict | None:
    """The verdict of the newest attempt that has one."""
    for attempt in range(newest_attempt(folder), 0, -1):
        verdict = read_verdict(folder, attempt)
        if verdict is not None:
            return verdict
    return None


def read_fork(folder: RunFolder) -> dict[str, Any] | None:
    """Where a forked run comes from; None for any other run."""
    path = folder.path / FORK_FILE
    if not path.exists():
        return None
    origin: dict[str, Any] = json.loads(path.read_text())
    return origin


def create_run(choice: RunChoice, fork: dict[str, Any] | None = None) -> None:
    """Make the folder of a new run and write its resolved config. Raises StorageError, at once for an object store."""
    refuse_object_store(choice.folder.path)
    make_folder(choice.folder.path)
    if fork is None:
        (choice.folder.path / FORK_FILE).unlink(missing_ok=True)  # of a fork that never came to a commit
    else:
        replace_file(choice.folder.path / FORK_FILE, json.dumps(fork, indent=1).encode())
    write_resolved(choice.config, choice.folder.config)
