"""Ray's own logs of a node, kept in the run folder: a pod that goes takes its disk along."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from argusrl.errors import StorageError
from argusrl.storage.publish import make_folder, storage_faults

_ENDINGS = (".log", ".out", ".err")
_LEFT_OUT = ("runtime_env",)  # these say how every worker was started, with its whole environment
_MOST_OF_ONE = 1 << 20  # the end of a file says how it ended


def keep_logs(source: Path, target: Path, most_bytes: int, secrets: Collection[bytes] = ()) -> int:
    """Copy the ends of the newest logs, at most so many bytes in all; what has not changed is not copied again.

    Secrets are overwritten by stars. Files of before that are not among the newest any more go, so the folder stays
    bounded. Returns the bytes that were copied. Raises StorageError when the run folder does not take them.
    """
    kept, copied, room = set[str](), 0, most_bytes
    for changed, size, path in _newest_first(source):
        if room <= 0:
            break
        wanted = min(size, _MOST_OF_ONE, room)
        room -= wanted
        copy = target / path.relative_to(source).as_posix().replace("/", "_")
        kept.add(copy.name)
        if not _same(copy, wanted, changed):
            copied += _copy_end(path, copy, wanted, changed, secrets)
    if kept:
        _remove_others(target, kept)
    return copied


def _newest_first(source: Path) -> list[tuple[float, int, Path]]:
    found = []
    for path in source.rglob("*"):
        try:
            status = path.stat()
        except OSError:  # rotated away
            continue
        if path.suffix in _ENDINGS and status.st_size and path.is_file() and not path.name.startswith(_LEFT_OUT):
            found.append((status.st_mtime, status.st_size, path))
    return sorted(found, reverse=True)


def _same(copy: Path, most_bytes: int, changed: float) -> bool:
    try:
        status = copy.stat()
    except OSError:
        return False
    return status.st_size <= most_bytes and abs(status.st_mtime - changed) < 1e-3


def _copy_end(path: Path, copy: Path, size: int, changed: float, secrets: Collection[bytes]) -> int:
    try:
        with path.open("rb") as log:
            begin = log.seek(-size, 2)
            data = log.read(size)
    except OSError:  # rotated away, or cut meanwhile
        return 0
    if begin:  # not from the middle of a line, where half a secret would not be found
        data = data.partition(b"\n")[2]
    for secret in secrets:
        data = data.replace(secret, b"*" * len(secret))
    make_folder(copy.parent)
    with storage_faults(copy):
        copy.write_bytes(data)
        os.utime(copy, (changed, changed))
    return len(data)


def _remove_others(target: Path, kept: set[str]) -> None:
    try:
        with storage_faults(target):
            for path in target.iterdir():
                if path.name not in kept:
                    path.unlink(missing_ok=True)
    except (StorageError, FileNotFoundError):
        return
