"""Can this root hold runs? Tried, not guessed: rename, link, exclusive creation, append, fsync, speed, free space."""

from __future__ import annotations

import errno
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from argusrl.errors import StorageError, StorageUnusable
from argusrl.storage.filesystem import FileSystem, file_system, refuse_object_store
from argusrl.storage.free_space import FreeSpace, free_space
from argusrl.storage.publish import fsync_path, make_folder, storage_error, storage_faults, temporary_name, write_all

_SAMPLE_BYTES = 8 << 20
_FSYNC_SAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What `argusrl doctor` prints of a run root."""

    root: Path
    file_system: FileSystem
    free: FreeSpace
    fsync_seconds: float  # median of an appended 4 KiB made durable
    write_bytes_per_second: float  # sequential, made durable at the end


def probe_root(root: Path) -> ProbeResult:
    """Create `root` if needed and try everything a run folder relies on. Raises StorageError, leaves nothing behind.

    StorageUnusable where the file system lacks something.
    """
    refuse_object_store(root)
    make_folder(root)
    folder = temporary_name(root / "probe")
    with storage_faults(root):
        folder.mkdir()
    try:
        file = folder / "file"
        with storage_faults(root):
            speed = _write_speed(file)
            latency = _fsync_latency(folder / "appended")
        _require(root, "a hard link", lambda: os.link(file, folder / "linked"))
        _require_refusal(root, "a second link to a taken name", lambda: os.link(file, folder / "linked"))
        _require_refusal(root, "exclusive creation of a taken name", lambda: os.close(_create(file)))
        _require(root, "replacing a file by rename", lambda: os.replace(folder / "linked", file))
        _require(root, "making a folder", (folder / "inner").mkdir)
        _require(root, "renaming a folder", lambda: os.rename(folder / "inner", folder / "renamed"))
        _require(root, "fsync of a folder", lambda: fsync_path(folder))
        return ProbeResult(
            root=root,
            file_system=file_system(root),
            free=free_space(root),
            fsync_seconds=latency,
            write_bytes_per_second=speed,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)


def _write_speed(path: Path) -> float:
    block = os.urandom(1 << 20)
    descriptor = _create(path)
    start = time.perf_counter()
    try:
        for _ in range(_SAMPLE_BYTES // len(block)):
            write_all(descriptor, block)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return _SAMPLE_BYTES / max(time.perf_counter() - start, 1e-9)


def _fsync_latency(path: Path) -> float:
    descriptor = _create(path)
    samples = []
    try:
        for _ in range(_FSYNC_SAMPLES):
            start = time.perf_counter()
            write_all(descriptor, bytes(4096))
            os.fsync(descriptor)
            samples.append(time.perf_counter() - start)
    finally:
        os.close(descriptor)
    return statistics.median(samples)


_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ENOENT, errno.EIO})  # says nothing of its kind
_UNFIT = "object stores mounted as folders (S3) cannot do this: use FSx for Lustre, NFS or a local disk as run.root"


def _require(root: Path, what: str, action: Callable[[], object]) -> None:
    try:
        action()
    except OSError as error:
        raise _unfit(root, what, error) from error


def _require_refusal(root: Path, what: str, action: Callable[[], object]) -> None:
    try:
        action()
    except FileExistsError:
        return
    except OSError as error:
        raise _unfit(root, what, error) from error
    raise StorageUnusable(f"{root} cannot hold runs: {what} was not refused", _UNFIT)


def _unfit(root: Path, what: str, error: OSError) -> StorageError:
    fault = storage_error(error, root)
    if error.errno in _PASSING:
        return fault
    return StorageUnusable(f"{root} cannot hold runs: {what} failed ({fault.message})", _UNFIT)
