"""Reading a run folder: that something is not there is an answer, every other error is a StorageError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from argusrl.errors import StorageError


@contextmanager
def read_faults(path: Path) -> Iterator[None]:
    """Turns an OSError of the body into a StorageError; FileNotFoundError passes, it is an answer and no fault."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise StorageError(
            f"cannot read {path}: {reason}",
            "check the storage and that this user may read it, then run the same command again: it resumes",
        ) from error


def read_file(path: Path) -> bytes:
    """All bytes. Raises FileNotFoundError if there is no such file, StorageError if it cannot be read."""
    with read_faults(path):
        return path.read_bytes()


def exists(path: Path) -> bool:
    """Whether there is something under that name. Raises StorageError if storage does not tell."""
    with read_faults(path):
        return path.exists()


def list_folder(folder: Path) -> list[Path]:
    """What is in a folder, by name; nothing if it is not there. Raises StorageError if it cannot be read."""
    try:
        with read_faults(folder):
            return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def bytes_in(folder: Path) -> int:
    """Of the files in a folder, which may be being written. Raises StorageError if it cannot be read."""
    total = 0
    for path in list_folder(folder):
        with suppress(FileNotFoundError), read_faults(path):  # a temporary file of somebody else's
            total += path.stat().st_size
    return total
