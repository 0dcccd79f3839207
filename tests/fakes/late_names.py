"""A client of a network file system that learns late of what others wrote.

While active in a process, a path below `root` that was not there at the beginning and that this process did not make
itself does not exist, for whatever asks for it, until `seconds` after it was first asked for: a client that remembers
that a name was not there. Listings leave it out as long.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


class LateNames:
    """What one process sees of `root`."""

    def __init__(self, root: Path, seconds: float) -> None:
        self.root, self.seconds = os.path.realpath(root), seconds
        self.known = {
            os.path.join(top, name) for top, *lists in os.walk(self.root) for names in lists for name in names
        }
        self.own_folders: set[str] = set()  # renamed by this process: with all that is in them
        self.asked: dict[str, float] = {}
        self.refusals = 0

    def hides(self, path: Any) -> bool:
        """Whether this process does not see it yet."""
        if isinstance(path, int):
            return False
        text = _absolute(path)
        if not text.startswith(self.root + os.sep) or text in self.known:
            return False
        if any(text.startswith(folder + os.sep) for folder in self.own_folders):
            return False
        first = self.asked.setdefault(text, time.monotonic())
        return time.monotonic() - first < self.seconds

    def require(self, path: Any) -> None:
        if self.hides(path):
            self.refusals += 1
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))

    def learn(self, path: Any) -> None:
        self.known.add(_absolute(path))


def _absolute(path: Any) -> str:
    text = os.fspath(path)
    folder, name = os.path.split(os.path.abspath(text.decode() if isinstance(text, bytes) else text))
    return os.path.join(folder, name)


class _Entries:
    """What os.scandir gives, less what is hidden."""

    def __init__(self, real: Any, late: LateNames) -> None:
        self.real, self.late = real, late

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.real.close()

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> Any:
        while self.late.hides((entry := next(self.real)).path):
            pass
        return entry

    def close(self) -> None:
        self.real.close()


@contextmanager
def late_names(root: Path, seconds: float) -> Iterator[LateNames]:
    """Makes this process such a client of `root`."""
    late = LateNames(root, seconds)
    listdir, scandir = os.listdir, os.scandir

    def reading(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            late.require(path)
            return real(path, *arguments, **options)

        return call

    def opening(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            how = arguments[0] if arguments else options.get("mode", options.get("flags", "r"))
            creates = bool(how & os.O_CREAT) if isinstance(how, int) else bool(set("wxa") & set(how))
            if not creates:
                late.require(path)
            opened = real(path, *arguments, **options)
            if creates and not isinstance(path, int):
                late.learn(path)
            return opened

        return call

    def naming(real: Callable[..., Any], *, moves: bool = False) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            done = real(*arguments, **options)
            late.learn(arguments[1] if len(arguments) > 1 and not isinstance(arguments[1], int) else arguments[0])
            if moves and os.path.isdir(arguments[1]):
                late.own_folders.add(_absolute(arguments[1]))
            return done

        return call

    def visible_names(path: Any = ".") -> list[Any]:
        late.require(path)
        return [name for name in listdir(path) if not late.hides(os.path.join(path, name))]

    def visible_entries(path: Any = ".") -> _Entries:
        late.require(path)
        return _Entries(scandir(path), late)

    with ExitStack() as patches:
        for module, name, patched in (
            (os, "stat", reading(os.stat)),
            (os, "open", opening(os.open)),
            (io, "open", opening(io.open)),
            (builtins, "open", opening(builtins.open)),
            (os, "link", naming(os.link)),
            (os, "mkdir", naming(os.mkdir)),
            (os, "rename", naming(os.rename, moves=True)),
            (os, "replace", naming(os.replace)),
            (os, "listdir", visible_names),
            (os, "scandir", visible_entries),
        ):
            patches.enter_context(mock.patch.object(module, name, patched))
        yield late


def elsewhere(work: Callable[[], Any]) -> Any:
    """What `work` gives in a process of its own: what it writes is of others for this one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, pickle.dumps(work()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        data = answer.read()
    os.waitpid(child, 0)
    return pickle.loads(data)
