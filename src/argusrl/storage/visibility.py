"""Patience for names and sizes that another node wrote and this one does not see yet (EFS, NFS).

Readers of a run folder get names by message, so they know what must be there. Where the file system may be late they
wait for it, up to a deadline; whoever reads afterwards says what is missing. On a coherent one (Lustre, a local disk)
nothing is asked and nothing waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from argusrl.errors import StorageError
from argusrl.storage.filesystem import file_system
from argusrl.storage.manifest import MANIFEST
from argusrl.storage.sealed_json import read_sealed

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0

_missed: set[Path] = set()  # waited for in vain: what is lost is not waited for again and again


def await_visible(path: Path, size: int = 0) -> None:
    """Return when `path` is there with at least `size` bytes, or when its file system cannot be late any more."""
    _await(path, lambda: path.stat().st_size >= size)


def await_published(folder: Path) -> None:
    """Return when the manifest of a folder, and every file it names in full size, can be seen, or could by now."""
    await_visible(folder / MANIFEST)
    if not patience_seconds(folder.parent):
        return
    with suppress(FileNotFoundError, StorageError):
        for name, entry in read_sealed(folder / MANIFEST)["files"].items():
            await_visible(folder / name, entry["bytes"])


@lru_cache(maxsize=256)
def patience_seconds(folder: Path) -> float:
    """How long something that was written below `folder` may be invisible here."""
    return file_system(folder).visible_after_seconds


def _await(path: Path, visible: Callable[[], bool]) -> None:
    seconds = patience_seconds(path.parent)
    if not seconds or path in _missed:
        return
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    while True:
        with suppress(OSError):
            if visible():
                return
        if time.monotonic() >= deadline:
            _missed.add(path)
            return
        # Opening a folder makes an NFS client ask the server whether what it remembers of it still holds.
        with suppress(OSError):
            os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
