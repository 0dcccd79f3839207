"""A run folder in memory under the real journal: fast enough for thousands of simulated hours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest

from argusrl.cluster import node_care, notices, run_control, run_record
from argusrl.errors import CorruptionError, StorageError
from argusrl.journal import attempts, drains, epochs, node_reports, submissions
from argusrl.storage.layout import RunFolder

_MODULES = (attempts, drains, epochs, node_care, node_reports, notices, run_control, run_record, submissions)


@lru_cache(100_000)
def place(path: Path) -> tuple[str, str]:
    """Folder and name."""
    return str(path.parent), path.name


class Entry:
    """What a listing holds: as much of a path as the journal asks for, and cheap to make."""

    __slots__ = ("folder", "name")

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    @property
    def suffix(self) -> str:
        return f".{self.name.rpartition('.')[2]}"

    @property
    def path(self) -> Path:
        return self.folder / self.name


class MemoryFiles:
    """Files by folder and name. `touched` is called before and after a change, `away` says who cannot reach them."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, bytes]] = {}
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.parsed: dict[bytes, dict[str, Any]] = {}
        self.touched: Callable[[Path, bool], None] = lambda path, done: None
        self.away: Callable[[], bool] = lambda: False

    def check(self, path: Path) -> None:
        if self.away():
            raise StorageError(f"cannot read {path}: it is away")

    def exists(self, path: Path) -> bool:
        self.check(path)
        folder, name = place(path)
        return name in self.folders.get(folder, ()) or str(path) in self.folders

    def list_folder(self, folder: Path) -> list[Any]:
        self.check(folder)
        return [Entry(folder, name) for name in sorted(self.folders.get(str(folder), ()))]

    def read_file(self, path: Path) -> bytes:
        self.check(path)
        folder, name = place(path)
        try:
            return self.folders[folder][name]
        except KeyError:
            raise FileNotFoundError(str(path)) from None

    def read_sealed(self, path: Path) -> dict[str, Any]:
        try:
            data = self.read_file(getattr(path, "path", path))
        except FileNotFoundError:
            raise CorruptionError(f"{path} is missing") from None
        if data not in self.parsed:
            self.parsed[data] = json.loads(data)
            self.parsed[data].pop("seal", None)
        return self.parsed[data]

    def publish_file(self, path: Path, data: bytes) -> None:
        self.check(path)
        self.touched(path, False)
        folder = self.folders.setdefault(str(path.parent), {})
        if path.name in folder:
            raise FileExistsError(str(path))
        folder[path.name] = data
        self.touched(path, True)

    def replace_file(self, path: Path, data: bytes) -> None:
        self.check(path)
        self.folders.setdefault(str(path.parent), {})[path.name] = data

    def append_line(self, path: Path, record: dict[str, Any]) -> None:
        self.check(path)
        self.lines.setdefault(str(path), []).append(record)

    def read_lines(self, path: Path) -> list[dict[str, Any]]:
        self.check(path)
        return self.lines.get(str(path), [])


@contextmanager
def in_memory(files: MemoryFiles) -> Iterator[pytest.MonkeyPatch]:
    """While active, the journal of a run and the controller read and write `files`."""
    names = (
        "exists",
        "list_folder",
        "read_file",
        "read_sealed",
        "publish_file",
        "replace_file",
        "append_line",
        "read_lines",
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, attribute in list(vars(RunFolder).items()):  # the same few paths, thousands of times
            if isinstance(attribute, property) and attribute.fget is not None:
                patch.setattr(RunFolder, name, property(lru_cache(100_000)(attribute.fget)))
            elif isfunction(attribute) and not name.startswith("__"):
                patch.setattr(RunFolder, name, lru_cache(100_000)(attribute))
        for module in _MODULES:
            for name in names:
                if hasattr(module, name):
                    patch.setattr(module, name, getattr(files, name))
        yield patch
