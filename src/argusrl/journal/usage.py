"""What a run folder takes: bytes and files by kind. Reads sizes alone, so it may be asked of a run under way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from argusrl.journal.retention import is_temporary
from argusrl.storage.files import read_faults
from argusrl.storage.layout import RunFolder

KINDS = ("trajectories", "images", "adapters", "checkpoints", "journal", "metrics", "logs", "temporary", "other")
"""What a file of a run folder can be. journal: commits, epochs and other small records; logs: all of attempts/."""

_KIND_OF = {
    **{name: name for name in ("trajectories", "images", "adapters", "checkpoints")},
    **dict.fromkeys(("commits", "epochs", "retired", "quarantine", "config.yaml", "fork.json"), "journal"),
    **dict.fromkeys(("submissions", "drains", "node_actions", "controller.jsonl"), "journal"),
    **dict.fromkeys(("metrics.jsonl", "events.jsonl", "tensorboard", "evaluations", "report.html"), "metrics"),
    **dict.fromkeys(("attempts", "suspects", "rehearsal", "rehearsal.json"), "logs"),
}


@dataclass(frozen=True, slots=True)
class Size:
    """Of some files."""

    bytes: int = 0
    files: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.bytes + other.bytes, self.files + other.files)


def usage(run: RunFolder) -> dict[str, Size]:
    """By kind, all of KINDS. Raises StorageError if the folder cannot be read."""
    sizes = dict.fromkeys(KINDS, Size())
    with read_faults(run.path):
        for path, size in _files(run.path):
            parts = path.relative_to(run.path).parts
            temporary = any(is_temporary(Path(part)) for part in parts)
            kind = "temporary" if temporary else _KIND_OF.get(parts[0], "other")
            sizes[kind] += Size(size, 1)
    return sizes


def total(sizes: dict[str, Size]) -> Size:
    """Of all kinds."""
    return sum(sizes.values(), Size())


def size_of(path: Path) -> Size:
    """Of a file, or of everything in a folder; nothing where it is gone. Raises StorageError."""
    with suppress(FileNotFoundError), read_faults(path):
        if not path.is_dir():
            return Size(path.lstat().st_size, 1)
        return sum((Size(size, 1) for _, size in _files(path)), Size())
    return Size()


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Files below a folder and their sizes; what goes away meanwhile is left out."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with suppress(FileNotFoundError):
                yield path, path.lstat().st_size
