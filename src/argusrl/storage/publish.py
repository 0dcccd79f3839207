"""Atomic publication: what has a final name is whole and durable, whatever dies on the way.

Write under a temporary name, fsync, give it a name that never existed, fsync the parent. A call that returned is
durable; a failed fsync raises and is never tried again on the same file, because the kernel may have dropped the
dirty pages and would report success the second time.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from argusrl.errors import StorageError
from argusrl.storage.files import read_file
from argusrl.storage.free_space import why_full
from argusrl.storage.sealed_json import json_safe

_HINTS = {
    errno.ENOSPC: "free some space and run the same command again: it resumes",
    errno.EDQUOT: "raise the quota or free some space and run the same command again: it resumes",
    errno.EROFS: "the file system is mounted read-only: choose another run.root",
    errno.EACCES: "give this user write permission, or choose another run.root",
    errno.EPERM: "give this user write permission, or choose another run.root",
    errno.EIO: "the storage reported an I/O error: check it, then run the same command again",
    errno.ESTALE: "the network mount went away: mount it again, then run the same command again",
}


def storage_error(error: OSError, path: Path) -> StorageError:
    """The StorageError a user sees for `error` at `path`: what failed there, and what to do."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno == errno.ENOSPC and (why := why_full(path)):
        reason = f"{reason} ({why})"
    hint = _HINTS.get(error.errno or 0, "check that run.root is a POSIX folder this user can write to")
    return StorageError(f"cannot write {path}: {reason}", hint)


@contextmanager
def storage_faults(path: Path) -> Iterator[None]:
    """Turns an OSError of the body into a StorageError; FileExistsError passes, it is an answer and no fault."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise storage_error(error, path) from error


def write_all(descriptor: int, data: bytes) -> None:
    """os.write until everything is written; the kernel may take less at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def fsync_path(path: Path) -> None:
    """fsync a file or a folder by name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create `path` and its parents durably; fine if it exists.

    Raises StorageError, also where this process knew the folder and it is gone: a run folder that went away must find
    its place free when it comes back.
    """
    with storage_faults(path):
        if path.is_dir():
            _settle(path)
            return
        if str(path) in _settled:
            raise StorageError(f"{path} is gone", "mount it again, or restore it, and run the same command again")
        if path.parent != path:
            make_folder(path.parent)
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                raise StorageError(
                    f"{path} is a file, not a folder", "move it away, or choose another run.root"
                ) from None
        fsync_path(path.parent)
        _settled.add(str(path))


_settled: set[str] = set()  # folders whose names this process knows to be durable


def _settle(folder: Path) -> None:
    """Who made `folder` may have died before its name was durable; nothing in it would be safe then."""
    if str(folder) not in _settled:
        with suppress(PermissionError):  # a parent this user may not open: it was there before the run
            fsync_path(folder.parent)
        _settled.add(str(folder))


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no other process uses; it starts with a dot and ends in .tmp."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(6)}.tmp")


def publish_file(path: Path, data: bytes, *, make_parent: bool = True) -> None:
    """Write `path` once and durably. Raises FileExistsError if the name is taken, StorageError if storage fails."""
    if make_parent:
        make_folder(path.parent)
    temporary = temporary_name(path)
    with storage_faults(path):
        try:
            _write_new(temporary, data)
            try:
                os.link(temporary, path)
            except FileExistsError:
                # An NFS client that lost the reply repeats the link and then meets its own work.
                if not _same_file(temporary, path):
                    raise
        finally:
            with suppress(OSError):
                temporary.unlink()
        fsync_path(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` in the place of `path`: readers see the old bytes or the new ones. Raises StorageError."""
    make_folder(path.parent)
    temporary = temporary_name(path)
    with storage_faults(path):
        try:
            _write_new(temporary, data)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        fsync_path(path.parent)


@contextmanager
def publish_folder(final: Path) -> Iterator[Path]:
    """Yields a temporary folder to fill; afterwards it is durable under `final`, a name that never existed.

    The folder alone proves nothing: write its manifest next (manifest.write_manifest), that is what readers ask for.
    Raises FileExistsError if the name is taken, StorageError if storage fails. If the body raises, nothing appears.
    """
    make_folder(final.parent)
    temporary = temporary_name(final)
    with storage_faults(final):
        temporary.mkdir()
    try:
        with storage_faults(final):
            yield temporary
            _fsync_tree(temporary)
            if final.exists():  # rename would silently replace an empty folder
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
            try:
                os.rename(temporary, final)
            except OSError as error:
                if error.errno == errno.ENOTEMPTY:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from error
                raise
            fsync_path(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append `record` as one line of JSON in one write, durably. Raises StorageError.

    A line that a crash tore is closed first, so that it never swallows the next one.
    """
    make_folder(path.parent)
    line = encode_line(record)
    with storage_faults(path):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            write_all(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if not size:
            fsync_path(path.parent)


def encode_line(record: Mapping[str, Any]) -> bytes:
    """One line of JSON, newline included; NaN and infinities become strings."""
    return json.dumps(json_safe(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a JSONL file, in order; a torn line is skipped, a missing file is empty."""
    try:
        data = read_file(path)
    except FileNotFoundError:
        return []
    return list(_objects(data.split(b"\n")[:-1]))  # without its newline the last line is torn


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _write_new(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except FileNotFoundError:
        return False


def _fsync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_path(Path(parent) / name)
        fsync_path(Path(parent))
