"""What may be deleted, and when.

Garbage (what no commit names) of step k goes once commit k exists. What a commit names goes only after a write-once
record in retired/ says so, and never if a restart from the oldest kept checkpoint needs it.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from argusrl.errors import CorruptionError
from argusrl.journal.commits import Commit, CommitChain
from argusrl.journal.epochs import newest_epoch, numbered
from argusrl.storage.files import exists, list_folder
from argusrl.storage.layout import RunFolder
from argusrl.storage.manifest import has_manifest, read_manifest
from argusrl.storage.publish import fsync_path, publish_file, storage_faults, temporary_name
from argusrl.storage.sealed_json import encode_sealed, read_sealed

_ADAPTER_NAME = re.compile(r"v(\d{6,})\.e(\d{4,})")
_CHECKPOINT_NAME = re.compile(r"(\d{6,})\.e(\d{4,})")


Allow = Callable[[Path], bool]


def always(_: Path) -> bool:
    """Whatever it is, it may go."""
    return True


@dataclass(slots=True, kw_only=True)
class Collected:
    """What a collection removed, relative to the run folder; in a dry run what it would have removed."""

    garbage: list[str] = field(default_factory=list)
    retired: list[str] = field(default_factory=list)
    allow: Allow = always  # asked before each removal; False leaves it, as a dry run does


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """One durable checkpoint of the committed history."""

    step: int
    epoch: int
    path: Path


def collect_garbage(
    run: RunFolder,
    chain: CommitChain,
    *,
    keep_checkpoints: int,
    keep_adapters: int,
    protected_versions: Collection[int] = (),
    keep_trajectories: bool = True,
    from_step: int = 0,
    allow: Allow = always,
) -> Collected:
    """Delete what is neither committed nor needed. Call it after a commit, from the driver alone.

    Keeps the newest `keep_checkpoints` checkpoints, the newest `keep_adapters` adapters, those in
    `protected_versions` (the best one), and every adapter and trajectory from the oldest kept checkpoint on. Without a
    durable checkpoint nothing is retired. Steps below `from_step` are not searched for garbage again. What `allow`
    says no to stays, and is listed all the same. Raises StorageError if storage fails, CorruptionError if the chain
    is damaged.
    """
    collected = Collected(allow=allow)
    head = chain.head()
    if head is None:
        return collected
    _collect_steps(run, chain, head, from_step, collected)
    _collect_adapters(run, chain, head, collected)
    _collect_checkpoints(run, head, collected)
    kept = durable_checkpoints(run, chain)
    if kept:  # who published the newest one may have died before its name was durable
        with storage_faults(kept[-1].path):
            fsync_path(kept[-1].path)
            fsync_path(run.checkpoints)
    for checkpoint in kept[:-keep_checkpoints]:
        _retire(run, checkpoint.path, "checkpoint", checkpoint.step, collected)
    kept = kept[-keep_checkpoints:]
    if not kept:
        return collected
    oldest = kept[0].step
    # A skipped step may go on with an older adapter, so what is needed is read from the commits.
    needed = {chain.adapter(step).path for step in range(oldest, head.step + 1)}
    garbage = set(collected.garbage)  # of a dry run it is still there
    versions = [(version, path) for version, _, path in adapter_folders(run) if version <= head.step]
    committed = [(version, path) for version, path in versions if run.relative(path) not in garbage]
    for version, path in committed[: max(0, len(committed) - keep_adapters)]:
        if run.relative(path) not in needed and version not in protected_versions:
            _retire(run, path, "adapter", version, collected)
    if not keep_trajectories:
        parents = (run.trajectories(0).parent, run.images(0).parent)
        for step in sorted({step for parent in parents for step in numbered(parent) if 0 < step <= oldest}):
            _retire(run, run.trajectories(step), "trajectories", step, collected)  # first: verify asks for this one
            _retire(run, run.images(step), "images", step, collected)
    return collected


def sweep_temporaries(run: RunFolder) -> list[str]:
    """Delete what died half published or half deleted. Call it after claiming an epoch, before any actor starts."""
    removed: list[str] = []
    for parent in (run.adapters, run.checkpoints, run.trajectories(0).parent, run.images(0).parent):
        for path in list_folder(parent):
            if is_temporary(path):
                remove(path)
                removed.append(run.relative(path))
    return removed


def is_temporary(path: Path) -> bool:
    """Whether it has the name of something half published or half deleted (publish.temporary_name)."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def durable_checkpoints(run: RunFolder, chain: CommitChain) -> list[Checkpoint]:
    """Checkpoints with a manifest that names a commit of this chain, oldest first. Retired ones do not count."""
    found = []
    for step, epoch, path in checkpoint_folders(run):
        if is_retired(run, run.relative(path)) or not has_manifest(path):
            continue
        try:
            commit_sha256 = read_manifest(path).get("commit_sha256")
        except CorruptionError:
            continue  # verify reports it; a restart takes the one before
        if exists(run.commit(step)) and chain.sha256(step) == commit_sha256:
            found.append(Checkpoint(step, epoch, path))
    return sorted(found)


def retired_record(run: RunFolder, relative: str) -> Path:
    """Where the record lies that says `relative` was deleted on purpose."""
    return run.retired / (relative.replace("/", ".") + ".json")


def is_retired(run: RunFolder, relative: str) -> bool:
    """Whether `relative` was deleted on purpose. Raises CorruptionError if the record is damaged."""
    path = retired_record(run, relative)
    return exists(path) and read_sealed(path).get("path") == relative


def _collect_steps(run: RunFolder, chain: CommitChain, head: Commit, from_step: int, collected: Collected) -> None:
    named: dict[int, set[str]] = {}
    for parent in (run.trajectories(0).parent, run.images(0).parent):
        for step in numbered(parent):
            if not from_step <= step <= head.step:
                continue
            if step not in named:
                commit = head if step == head.step else chain.read(step)
                named[step] = {segment.path for segment in commit.segments}
            for path in list_folder(parent / f"{step:06d}"):
                if run.relative(path) not in named[step]:
                    _remove(run, path, collected, collected.garbage)


def _collect_adapters(run: RunFolder, chain: CommitChain, head: Commit, collected: Collected) -> None:
    for version, epoch, path in adapter_folders(run):
        closed = version <= head.step and epoch <= head.epoch
        if closed and chain.adapter(version).path != run.relative(path):
            _remove(run, path, collected, collected.garbage)


def _collect_checkpoints(run: RunFolder, head: Commit, collected: Collected) -> None:
    """Unfinished checkpoints of drivers that are gone; one of the present driver may still be being written."""
    present = newest_epoch(run)
    for step, epoch, path in checkpoint_folders(run):
        if step <= head.step and epoch < present and not has_manifest(path):
            _remove(run, path, collected, collected.garbage)


def _retire(run: RunFolder, path: Path, kind: str, step: int, collected: Collected) -> None:
    relative = run.relative(path)
    if not exists(path):
        return
    record = {"path": relative, "kind": kind, "step": step, "time": time.time()}
    if collected.allow(path):
        with suppress(FileExistsError):  # a collection before this one died between the record and the deletion
            publish_file(retired_record(run, relative), encode_sealed(record))
        remove(path)
    collected.retired.append(relative)


def _remove(run: RunFolder, path: Path, collected: Collected, removed: list[str]) -> None:
    if collected.allow(path):
        remove(path)
    removed.append(run.relative(path))


def remove(path: Path) -> None:
    """Delete a file or a folder that nothing names any more. Fine if it is gone. Raises StorageError."""
    with storage_faults(path), suppress(FileNotFoundError):  # a driver that lost the run may be deleting it, too
        if path.is_dir():
            # First out of sight: what is half deleted must not look published, nor be finished by who began it.
            hidden = temporary_name(path)
            os.rename(path, hidden)
            shutil.rmtree(hidden)
        else:
            path.unlink()


def adapter_folders(run: RunFolder) -> Iterator[tuple[int, int, Path]]:
    """(version, epoch, folder) of everything that has an adapter's name."""
    return _named(run.adapters, _ADAPTER_NAME)


def checkpoint_folders(run: RunFolder) -> Iterator[tuple[int, int, Path]]:
    """(step, epoch, folder) of everything that has a checkpoint's name."""
    return _named(run.checkpoints, _CHECKPOINT_NAME)


def _named(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[int, int, Path]]:
    for path in list_folder(folder):
        if match := pattern.fullmatch(path.name):
            yield int(match[1]), int(match[2]), path
