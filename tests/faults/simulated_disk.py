"""A file system in memory with the mercy of a real one: what was not made durable may be gone after a power loss.

`patched` puts it behind `os` and `open` for every path under ROOT, so the code under test is the real code. Every call
first asks `interrupt`, which may run other tasks, raise OSError, or end the calling process.

    file      what was written after the last fsync survives in part, as zeros, or not; after a failed fsync it is lost
              though a later fsync says it succeeded (the kernel dropped the dirty pages)
    folder    each name made, moved or removed after the folder's last fsync survives or not
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

ROOT = "/simulated-storage"
_FIRST_DESCRIPTOR = 1 << 20
_MUTATING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class File:
    __slots__ = ("data", "doomed", "durable", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.data = bytearray()
        self.durable = b""
        self.doomed = False

    def lose(self, random: Random) -> None:
        """Keep what a power loss leaves."""
        rest = bytes(self.data[len(self.durable) :])
        if self.doomed or self.data[: len(self.durable)] != self.durable:
            rest = b""
        rest = rest[: random.randrange(len(rest) + 1)] if random.random() < 0.5 else rest
        if rest and random.random() < 0.3:
            rest = bytes(len(rest))  # the size reached the disk, the bytes did not
        self.durable += rest
        self.data, self.doomed = bytearray(self.durable), False


class Folder:
    __slots__ = ("durable", "names", "number", "pending", "recent")

    def __init__(self, number: int) -> None:
        self.number = number
        self.names: dict[str, File | Folder] = {}
        self.durable: dict[str, File | Folder] = {}
        self.pending: list[tuple[str, str, File | Folder | None]] = []  # (name gone, name there, what)
        self.recent: list[tuple[str, object]] = []  # names made, and by whom: what a stale listing lacks

    def change(self, gone: str, there: str, what: File | Folder | None, who: object) -> None:
        if gone:
            del self.names[gone]
        if there and what is not None:
            self.names[there] = what
            self.recent.append((there, who))
        self.pending.append((gone, there, what))

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.pending.clear()

    def lose(self, random: Random, seen: set[int]) -> None:
        keep = random.choice((0.0, 0.5, 0.5, 1.0))
        for gone, there, what in self.pending:
            if random.random() < keep:
                self.durable.pop(gone, None)
                if there and what is not None:
                    self.durable[there] = what
        self.pending.clear()
        self.recent.clear()
        self.names = dict(self.durable)
        for what in self.names.values():
            if what.number not in seen:
                seen.add(what.number)
                what.lose(random, seen) if isinstance(what, Folder) else what.lose(random)


class _Reader(io.BytesIO):
    def __init__(self, disk: SimulatedDisk, file: File) -> None:
        super().__init__(bytes(file.data))
        self._disk, self._descriptor = disk, disk.describe(file)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        self._disk.open_files.pop(self._descriptor, None)
        super().close()


class _Writer(io.RawIOBase):
    def __init__(self, disk: SimulatedDisk, descriptor: int) -> None:
        self._disk, self._descriptor = disk, descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(bytes(data))
        while view:  # as the buffered file of `open` does
            view = view[self._disk.write(self._descriptor, view) :]
        return len(data)

    def close(self) -> None:
        self._disk.open_files.pop(self._descriptor, None)
        super().close()


class _Entry:
    __slots__ = ("_folder", "name", "path")

    def __init__(self, path: str, name: str, folder: bool) -> None:
        self.name, self.path, self._folder = name, f"{path}/{name}", folder

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._folder

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return not self._folder

    def is_symlink(self) -> bool:
        return False

    def is_junction(self) -> bool:
        return False


class _Entries(list):
    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def __next__(self) -> _Entry:
        if not self:
            raise StopIteration
        return self.pop(0)

    def __iter__(self) -> Iterator[_Entry]:
        return self


class SimulatedDisk:
    """`interrupt(call, path)` is asked before each call; `who()` names the calling process."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.numbers = 0
        self.root = Folder(0)
        self.open_files: dict[int, File | Folder] = {}
        self.interrupt: Callable[[str, str], str | None] = lambda call, path: None
        self.who: Callable[[], object] = lambda: None
        self.stale_listings = 0.0  # probability

    def power_loss(self) -> None:
        self.root.lose(self.random, set())
        self.open_files.clear()

    def describe(self, what: File | Folder) -> int:
        self.numbers += 1
        self.open_files[_FIRST_DESCRIPTOR + self.numbers] = what
        return _FIRST_DESCRIPTOR + self.numbers

    def _find(self, path: str) -> File | Folder:
        node: File | Folder = self.root
        for part in path[len(ROOT) + 1 :].split("/"):
            if part:
                if not isinstance(node, Folder) or part not in node.names:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                node = node.names[part]
        return node

    def _parent(self, path: str) -> tuple[Folder, str]:
        parent, _, name = path.rpartition("/")
        folder = self._find(parent)
        if not isinstance(folder, Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return folder, name

    def _ask(self, call: str, path: str) -> None:
        """Raises the fault that `interrupt` names, unless it is to be raised when the work is done."""
        if fault := self.interrupt(call, path):
            raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)), path)

    def open(self, path: str, flags: int) -> int:
        self._ask("create" if flags & os.O_CREAT else "open", path)
        folder, name = self._parent(path)
        if name in folder.names:
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        elif flags & os.O_CREAT:
            self.numbers += 1
            folder.change("", name, File(self.numbers), self.who())
        what = self._find(path)
        if flags & os.O_TRUNC and isinstance(what, File):
            what.data.clear()
        return self.describe(what)

    def _file(self, descriptor: int) -> File:
        what = self.open_files.get(descriptor)
        if not isinstance(what, File):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return what

    def write(self, descriptor: int, data: Any) -> int:
        file = self._file(descriptor)
        fault = self.interrupt("write", "")
        size = len(data)
        if fault or (size > 1 and self.random.random() < 0.02):
            size = self.random.randrange(size) if fault else self.random.randrange(1, size)
        file.data += bytes(data[:size])
        if fault:
            raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))
        return size

    def pread(self, descriptor: int, size: int, offset: int) -> bytes:
        return bytes(self._file(descriptor).data[offset : offset + size])

    def close(self, descriptor: int) -> None:
        if self.open_files.pop(descriptor, None) is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def fsync(self, descriptor: int) -> None:
        what = self.open_files.get(descriptor)
        fault = self.interrupt("fsync", "")
        if what is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if fault:
            if isinstance(what, File) and what.data != what.durable:
                what.doomed = True
            raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))
        if isinstance(what, Folder):
            what.sync()
        elif not what.doomed:
            what.durable = bytes(what.data)

    def link(self, source: str, target: str) -> None:
        fault = self.interrupt("link", target)
        what = self._find(source)
        folder, name = self._parent(target)
        if name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        if not fault or self.random.random() < 0.5:  # a failed link may have happened: only its reply was lost
            folder.change("", name, what, self.who())
        if fault:
            raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)), target)

    def rename(self, source: str, target: str) -> None:
        self._ask("rename", target)
        folder, old = self._parent(source)
        other, new = self._parent(target)
        what = self._find(source)
        there = other.names.get(new)
        if isinstance(there, Folder) and there.names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
        assert folder is other, "the run folder never moves anything between folders"
        folder.change(old, new, what, self.who())

    def unlink(self, path: str) -> None:
        self._ask("unlink", path)
        folder, name = self._parent(path)
        if not isinstance(self._find(path), File):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        folder.change(name, "", None, self.who())

    def mkdir(self, path: str) -> None:
        self._ask("mkdir", path)
        folder, name = self._parent(path)
        if name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self.numbers += 1
        folder.change("", name, Folder(self.numbers), self.who())

    def rmdir(self, path: str) -> None:
        self._ask("rmdir", path)
        folder, name = self._parent(path)
        what = self._find(path)
        if not isinstance(what, Folder) or what.names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        folder.change(name, "", None, self.who())

    def stat(self, path: str) -> Any:
        self._ask("stat", path)
        return self._status(self._find(path))

    def fstat(self, descriptor: int) -> Any:
        return self._status(self.open_files[descriptor])

    def _status(self, what: File | Folder) -> Any:
        mode, size = (stat.S_IFDIR, 0) if isinstance(what, Folder) else (stat.S_IFREG, len(what.data))
        return SimpleNamespace(st_mode=mode | 0o700, st_size=size, st_ino=what.number, st_dev=1 << 40)

    def listdir(self, path: str) -> list[str]:
        self._ask("list", path)
        folder = self._find(path)
        if not isinstance(folder, Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        names = list(folder.names)
        if self.stale_listings and folder.recent and self.random.random() < self.stale_listings:
            newest = self.random.randint(1, 2)
            missing = {name for name, who in folder.recent[-newest:] if who is not self.who()}
            names = [name for name in names if name not in missing]
        return names

    def scandir(self, path: str) -> _Entries:
        self._ask("list", path)
        folder = self._find(path)
        assert isinstance(folder, Folder)
        return _Entries(_Entry(path, name, isinstance(what, Folder)) for name, what in folder.names.items())

    def open_file(self, path: str, mode: str) -> Any:
        if mode in ("wb", "w"):
            raw = _Writer(self, self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
            return raw if "b" in mode else io.TextIOWrapper(raw)
        self._ask("open", path)
        what = self._find(path)
        if not isinstance(what, File):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        reader = _Reader(self, what)
        return reader if "b" in mode else io.TextIOWrapper(reader)


@contextmanager
def patched(current: Callable[[], SimulatedDisk]) -> Iterator[None]:
    """While active, `os` and `open` serve paths under ROOT from the disk that `current` gives."""
    saved = []

    def patch(module: Any, name: str, replacement: Any) -> None:
        saved.append((module, name, getattr(module, name)))
        setattr(module, name, replacement)

    def by_path(name: str) -> None:
        original = getattr(os, name)

        def call(path: Any, *rest: Any, **options: Any) -> Any:
            if path.__class__ is not int and (text := str(path)).startswith(ROOT):
                disk = current()
                if name in ("link", "rename", "replace"):
                    return (disk.link if name == "link" else disk.rename)(text, str(rest[0]))
                if name == "open":
                    return disk.open(text, rest[0])
                return getattr(disk, {"lstat": "stat", "remove": "unlink"}.get(name, name))(text)
            return original(path, *rest, **options)

        patch(os, name, call)

    def by_descriptor(name: str) -> None:
        original = getattr(os, name)

        def call(descriptor: int, *rest: Any) -> Any:
            if descriptor >= _FIRST_DESCRIPTOR:
                return getattr(current(), name)(descriptor, *rest)
            return original(descriptor, *rest)

        patch(os, name, call)

    for name in ("stat", "lstat", "mkdir", "rmdir", "unlink", "remove", "listdir", "scandir", "open"):
        by_path(name)
    for name in ("link", "rename", "replace"):
        by_path(name)
    for name in ("write", "pread", "close", "fsync", "fstat"):
        by_descriptor(name)
    original_open = io.open

    def open_file(path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if path.__class__ is not int and (text := str(path)).startswith(ROOT):
            return current().open_file(text, mode)
        return original_open(path, mode, *rest, **options)

    patch(io, "open", open_file)
    patch(shutil, "_use_fd_functions", False)
    try:
        yield
    finally:
        for module, name, original in reversed(saved):
            setattr(module, name, original)
