"""A disk that is really full, a mount that goes away, and an fsync that fails in a process that lives."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from argusrl.journal.commits import CommitChain
from argusrl.journal.verify import verify_run
from e2e.started import REAL_FAULTS, Started, injected, same_end
from e2e.test_train import driver_of

pytestmark = REAL_FAULTS


def mount(*words: str | Path) -> None:
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this user may not mount: {done.stderr.strip()}")


def unmount(folder: Path) -> None:
    """At once, whoever has files of it open."""
    subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", folder)
    try:
        yield folder
    finally:
        unmount(folder)


def fill(disk: Path) -> Path:
    """A file that takes all the room there is."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    assert shutil.disk_usage(disk).free < 1 << 16
    return filler


def test_a_full_disk_is_waited_for_and_a_run_that_ended_over_it_resumes(calm, tmp_path):
    with small_disk(tmp_path / "disk", 256) as disk:
        filler = fill(disk)
        os.truncate(filler, filler.stat().st_size - (1 << 20))  # enough for a config, for a run it is not
        run = Started(disk, "full", "recovery.storage_wait_seconds=15", log=tmp_path / "log")
        run.until(lambda: run.says("Waiting for the run folder"))
        filler.unlink()
        run.until(lambda: run.playing(1))
        filler = fill(disk)
        run.until(lambda: run.log.read_text().count("Waiting for the run folder") == 2)
        filler.unlink()
        run.until(run.folder.commit(1).exists)
        run.until(lambda: run.playing(2))
        filler = fill(disk)
        assert run.end() == 5, run.log.read_text()
        assert run.says("waited 15 s")
        filler.unlink()
        assert verify_run(run.folder) == []
        assert run.resume() == 0, run.log.read_text()
        assert {"waiting", "fault", "recovered"} <= set(run.kinds())
        assert {fault["fault"] for fault in run.events("fault")} == {"storage"}
        assert verify_run(run.folder) == []
        assert same_end(run.folder, calm)


def test_a_mount_that_goes_away_and_comes_back(calm, tmp_path):
    """A lazy unmount: files that are open stay usable, every name is gone, and an empty folder is in their place."""
    disk, root = tmp_path / "disk", tmp_path / "root"
    disk.mkdir()
    root.mkdir()
    mount("--bind", disk, root)
    try:
        run = Started(root, "unmounted", log=tmp_path / "log")
        run.until(lambda: run.playing(2))
        unmount(root)
        time.sleep(30.0)
        assert list(root.iterdir()) == []  # nothing was put in its place
        assert run.process.poll() is None
        mount("--bind", disk, root)
        assert run.end() == 0, run.log.read_text()
        assert "waiting" in run.kinds()
        assert verify_run(run.folder) == []
        assert same_end(run.folder, calm)
    finally:
        unmount(root)


def test_a_failed_fsync_is_never_acknowledged_afterwards(calm, runs):
    """In each kind of process that writes: what it had under way is given up, and a new epoch writes it again."""
    run = Started(runs, "fsync")
    for step, victim in enumerate(["driver", "EpisodeWorker", "RankWorker"], start=1):
        run.until(lambda step=step: run.playing(step))
        process = driver_of(run.process) if victim == "driver" else run.workers(victim)[0]
        before = len(run.events("fault"))
        with injected([process.pid], "error=EIO:when=1"):
            run.until(lambda before=before: len(run.events("fault")) > before)
    assert run.end() == 0, run.log.read_text()
    assert {fault["fault"] for fault in run.events("fault")} == {"storage"}
    epochs = [CommitChain(run.folder).read(step).epoch for step in range(4)]
    assert epochs == sorted(set(epochs))
    assert verify_run(run.folder) == []
    assert same_end(run.folder, calm)
