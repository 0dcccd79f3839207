"""Faults of the real stack that a user meets first; many more are under `make test-faults`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from argusrl.journal.commits import CommitChain
from argusrl.journal.verify import verify_run
from argusrl.observe.events import read_events
from argusrl.storage.layout import RunFolder
from e2e.conftest import QUICKSTART, ROOT, SMALL, command, environment
from e2e.test_train import driver_of

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]


class Started:
    """A run under way."""

    def __init__(self, runs: Path, name: str, *overrides: str) -> None:
        self.words = command("train", QUICKSTART, f"run.root={runs}", f"run.name={name}", *SMALL, *overrides)
        self.folder = RunFolder(runs / name)
        self.log = runs / f"{name}.log"
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """One more command like the first."""
        with self.log.open("ab") as log:
            return subprocess.Popen(self.words, cwd=ROOT, env=environment(), stdout=log, stderr=log)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.01)

    def playing(self, step: int, size: int = 2000) -> bool:
        """Whether the journal holds a part of this step and no commit does."""
        segments = self.folder.trajectories(step).glob("*.seg") if not self.folder.commit(step).exists() else ()
        return any(segment.stat().st_size > size for segment in segments)

    def end(self, process: subprocess.Popen[bytes] | None = None) -> int:
        return (process or self.process).wait(timeout=240)

    def kinds(self) -> list[str]:
        return [event["kind"] for event in read_events(self.folder.events)]


def same_end(one: RunFolder, other: RunFolder) -> bool:
    heads = [CommitChain(folder).head() for folder in (one, other)]
    return (heads[0].step, heads[0].state_digest) == (heads[1].step, heads[1].state_digest)


def test_a_run_folder_that_goes_away_and_comes_back(calm, runs):
    run = Started(runs, "gone")
    run.until(lambda: run.playing(1))
    run.folder.path.rename(runs / "away")
    time.sleep(3.0)
    assert not run.folder.path.exists()  # nothing was put in its place
    (runs / "away").rename(run.folder.path)
    run.until(run.folder.commit(2).exists)
    run.folder.path.rename(runs / "away")
    time.sleep(3.0)
    assert not run.folder.path.exists()
    (runs / "away").rename(run.folder.path)
    assert run.end() == 0, run.log.read_text()
    assert "waiting" in run.kinds()
    assert verify_run(run.folder) == []
    assert same_end(run.folder, calm)


def test_two_drivers_of_one_run_make_one_history(calm, runs):
    run = Started(runs, "two")
    run.until(lambda: run.playing(1))
    paused = [psutil.Process(run.process.pid), driver_of(run.process)]
    for process in paused:
        process.suspend()
    first, run.process = run.process, run.start()
    run.until(run.folder.commit(2).exists)
    for process in paused:
        process.resume()
    assert [run.end(first), run.end()] == [8, 0], run.log.read_text()
    assert "another argusrl train drives this run now" in run.log.read_text()
    assert verify_run(run.folder) == []
    assert same_end(run.folder, calm)


def test_signals_twice_in_a_rollout_keep_what_was_played(calm, runs):
    run = Started(runs, "signals")
    run.until(lambda: run.playing(2, size=20_000))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        os.kill(run.process.pid, number)
        time.sleep(0.05)
    assert run.end() == 75, run.log.read_text()
    assert verify_run(run.folder) == []
    assert run.end(run.start()) == 0, run.log.read_text()
    (adopted,) = [event for event in read_events(run.folder.events) if event["kind"] == "adopted"]
    assert adopted["trajectories"] + adopted["unfinished"] > 0
    assert verify_run(run.folder) == []
    assert same_end(run.folder, calm)
