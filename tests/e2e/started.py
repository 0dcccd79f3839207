"""Runs under way, for tests that do something to them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from argusrl.journal.attempts import Verdict, newest_attempt, read_verdict
from argusrl.journal.commits import CommitChain
from argusrl.observe.events import read_events
from argusrl.storage.layout import RunFolder
from e2e.conftest import QUICKSTART, ROOT, SMALL, command, environment

EVERYTHING = os.environ.get("ARGUSRL_FAULTS") == "all"
only_in_test_faults = pytest.mark.skipif(not EVERYTHING, reason="make test-faults")
REAL_FAULTS = [
    pytest.mark.ray,
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    only_in_test_faults,
]
"""Marks of a file whose tests all do something to a run, and run in `make test-faults` alone."""
PATIENCE_SECONDS = 240.0


class Started:
    """One `argusrl train`, its folder and what it prints."""

    def __init__(self, root: Path, name: str, *overrides: str, log: Path | None = None, **variables: str) -> None:
        self.words = command("train", QUICKSTART, f"run.root={root}", f"run.name={name}", *SMALL, *overrides)
        self.folder = RunFolder(root / name)
        self.log = log or root / f"{name}.log"
        self.environment = environment() | variables
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """One more command like the first."""
        with self.log.open("ab") as log:
            return subprocess.Popen(self.words, cwd=ROOT, env=self.environment, stdout=log, stderr=log)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until something is so, while the command runs."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def playing(self, step: int, size: int = 2000) -> bool:
        """Whether the journal holds a part of this step and no commit does."""
        with suppress(OSError):
            segments = self.folder.trajectories(step).glob("*.seg") if not self.folder.commit(step).exists() else ()
            return any(segment.stat().st_size > size for segment in segments)
        return False

    def says(self, text: str) -> bool:
        return text in self.log.read_text()

    def end(self, process: subprocess.Popen[bytes] | None = None) -> int:
        """The exit code, once there is one."""
        return (process or self.process).wait(timeout=240)

    def resume(self) -> int:
        """The same command again, to its end."""
        self.process = self.start()
        return self.end()

    def events(self, kind: str) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            return [event for event in read_events(self.folder.events) if event["kind"] == kind]
        return []

    def kinds(self) -> list[str]:
        return [event["kind"] for event in read_events(self.folder.events)]

    def verdict(self) -> Verdict | None:
        """Of the newest attempt."""
        return read_verdict(self.folder, newest_attempt(self.folder))

    def workers(self, kind: str) -> list[psutil.Process]:
        """Its living Ray actors of a class."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                title = " ".join(process.cmdline())
                if title.startswith("ray::") and kind in title:
                    found.append(process)
        return found


def same_end(one: RunFolder, other: RunFolder) -> bool:
    """Whether adapter, Adam and RNG of two runs are equal, bit for bit, after the last step of both."""
    heads = [CommitChain(folder).head() for folder in (one, other)]
    return (heads[0].step, heads[0].state_digest) == (heads[1].step, heads[1].state_digest)


@contextmanager
def injected(pids: Sequence[int], what: str) -> Iterator[subprocess.Popen[bytes]]:
    """strace does something to the fsync calls of living processes."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    words = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync", "-e", f"inject=fsync:{what}"]
    tracer = subprocess.Popen([*words, *(f"--attach={pid}" for pid in pids)])
    try:
        yield tracer
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait(timeout=30)
