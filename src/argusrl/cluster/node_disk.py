"""`python -m argusrl.cluster.node_disk`: what a worker's pod does with the node's own disk before Ray starts on it.

It removes what pods that are gone have spilled, and copies the base weights there once: later pods on that node find
them. A copy appears under its name in one piece, with the times of its source, so that weights which changed there are
copied again. Running pods keep the copy they have open.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from argusrl.errors import ArgusError, ModelError, StorageError

_SPARE_BYTES = 8 << 30  # of the disk stay free for spilled objects
_PARALLEL_COPIES = 4  # one stream does not fill the network


def clear_spill(folder: Path) -> int:
    """Remove the folders of pods that are gone: one pod of a run is on a node at a time. Returns how many."""
    leavings = list(folder.iterdir()) if folder.is_dir() else []
    for path in leavings:
        shutil.rmtree(path, ignore_errors=True)
    return len(leavings)


def stage(source: Path, copy: Path) -> bool:
    """Make `copy` hold what the folder `source` holds; whether anything had to be copied.

    Safe to be called by several pods of a node at once. Raises ModelError when there is nothing at the source or it
    changes meanwhile, StorageError when the disk is too small or fails.
    """
    copy.parent.mkdir(parents=True, exist_ok=True)
    with _locked(copy.with_name(f".{copy.name}.lock")):
        found = _contents(source)
        if not found:
            raise ModelError(f"model.path: no files in {source}", "put the model there, or name another folder")
        if _contents(copy) == found:
            return False
        fresh, old = copy.with_name(f".{copy.name}.new"), copy.with_name(f".{copy.name}.old")
        for leaving in (fresh, old):
            shutil.rmtree(leaving, ignore_errors=True)
        try:
            _require_space(copy.parent, sum(size for size, _ in found.values()))
            _copy(source, fresh, list(found))
            if _contents(source) != found:
                raise ModelError(f"{source} changed while it was copied", "let whatever writes it finish first")
            if copy.exists():
                copy.rename(old)
            fresh.rename(copy)
        except OSError as error:
            raise StorageError(
                f"cannot copy {source} to {copy}: {error.strerror}",
                "cluster.kubernetes.nvme: null trains without a copy",
            ) from error
        finally:
            for leaving in (fresh, old):
                shutil.rmtree(leaving, ignore_errors=True)
        return True


def _contents(folder: Path) -> dict[str, list[int]]:
    """Relative name → [bytes, time of change in ns] of every file; links count as what they show."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            status = path.stat()
            found[path.relative_to(folder).as_posix()] = [status.st_size, status.st_mtime_ns]
    return found


def _require_space(folder: Path, size_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < size_bytes + _SPARE_BYTES:
        raise StorageError(
            f"{folder}: {free_bytes:,} bytes are free; the weights take {size_bytes:,}, and {_SPARE_BYTES:,} stay free",
            "empty the disk, or train without a copy: cluster.kubernetes.nvme: null",
        )


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    def one(name: str) -> None:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        status = (source / name).stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    with ThreadPoolExecutor(_PARALLEL_COPIES) as pool:
        list(pool.map(one, names))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of one run: 0, or that of the error."""
    parser = argparse.ArgumentParser(description="Prepare a node's own disk for a worker of a run.")
    parser.add_argument("--spill", type=Path, required=True, help="folder that the run's pods on this node spill into")
    parser.add_argument("--weights", type=Path, help="model folder on the shared file system")
    parser.add_argument("--copy", type=Path, help="where its copy on this node is to be")
    options = parser.parse_args(arguments)
    try:
        removed = clear_spill(options.spill)
        options.spill.mkdir(parents=True, exist_ok=True)
        print(f"{options.spill}: removed what {removed} earlier pods had spilled")
        if options.weights is not None and options.copy is not None:
            started = time.monotonic()
            copied = stage(options.weights, options.copy)
            done = f"copied in {time.monotonic() - started:.0f} s" if copied else "has them already"
            print(f"{options.copy}: {done}")
    except ArgusError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
