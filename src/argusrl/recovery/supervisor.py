"""Keeps a run going: starts the driver process, waits, decides by decide.py, starts it again.

It imports neither Ray nor torch, so it stays alive when they do not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from argusrl.config.load import write_resolved
from argusrl.config.sections import Config
from argusrl.errors import Interrupted
from argusrl.journal.attempts import Verdict, next_attempt, read_verdict, write_verdict
from argusrl.recovery.decide import AttemptEnd, decide, signal_name
from argusrl.storage.layout import RunFolder

DRIVER = (sys.executable, "-m", "argusrl.training.driver")  # + run folder, number of the attempt
_PR_SET_PDEATHSIG = 1


def supervise(folder: RunFolder, config: Config, *, say: Callable[[str], None], debug: bool = False) -> int:
    """Run drivers of `folder` until one completes or the rule says stop; the exit code of the whole command."""
    recovery = config.recovery
    history: list[AttemptEnd] = []
    with _Signals(recovery.grace_seconds) as signals:
        while not signals.asked_to_stop:
            attempt = next_attempt(folder)
            write_resolved(config, folder.attempt(attempt) / "config.yaml")
            end = _run_attempt(folder, attempt, signals, debug=debug)
            if signals.asked_to_stop and end.exit_code != 0:
                break
            history.append(end)
            decision = decide(history, max_restarts=recovery.max_restarts, window_seconds=recovery.window_seconds)
            if decision.action == "stop":
                # The driver has told its own fault itself.
                if decision.exit_code not in (0, Interrupted.exit_code) and decision.reason != end.message:
                    say(f"Stopped: {decision.reason}")
                return decision.exit_code
            say(f"Restarting ({len(history)}): {decision.reason}")
    return Interrupted.exit_code  # whatever became of the driver: the same command resumes


def _run_attempt(folder: RunFolder, attempt: int, signals: _Signals, *, debug: bool) -> AttemptEnd:
    command = [*DRIVER, str(folder.path), str(attempt)]
    process = subprocess.Popen(
        command + (["--debug"] if debug else []),
        # A session of its own: Ctrl-C reaches the supervisor alone, which asks the driver to seal and stop.
        start_new_session=True,
        preexec_fn=_die_with_parent(os.getpid()),
    )
    signals.forward_to(process)
    verdict = _verdict(folder, attempt, process.wait())
    return AttemptEnd(
        exit_code=verdict.exit_code,  # a driver that crashed while it cleaned up after itself has ended as it says
        ended_at=time.time(),
        committed_steps=verdict.step or 0,
        error=verdict.error,
        message=verdict.reason.partition("\n")[0],
    )


def _verdict(folder: RunFolder, attempt: int, code: int) -> Verdict:
    """What the driver wrote about its own end; a killed one wrote nothing, so the supervisor does."""
    verdict = read_verdict(folder, attempt)
    if verdict is not None:
        return verdict
    killed = code < 0
    reason = f"killed by {signal_name(-code)}" if killed else f"the driver ended with code {code}"
    return write_verdict(
        folder,
        attempt,
        Verdict(
            outcome="killed" if killed else "failed",
            exit_code=code,
            reason=reason,
            step=count_commits(folder),
            time=time.time(),
        ),
    )


def count_commits(folder: RunFolder) -> int:
    """Committed training steps, by name only."""
    step = 0
    while folder.commit(step + 1).exists():
        step += 1
    return step


class _Signals:
    """While active, SIGINT and SIGTERM ask the driver to stop; one that does not stop in time is killed."""

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.process: subprocess.Popen[bytes] | None = None
        self.previous: dict[int, Any] = {}
        self.asked_to_stop = False

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous[number] = signal.signal(number, self._stop)
        self.previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._kill)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def forward_to(self, process: subprocess.Popen[bytes]) -> None:
        """From now on signals are for this driver; one that came while it was being started, too."""
        self.process = process
        if self.asked_to_stop:
            self._ask()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        first, self.asked_to_stop = not self.asked_to_stop, True
        if first:  # asking again does not give more time
            self._ask()

    def _ask(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, self.grace_seconds)

    def _kill(self, number: int, frame: FrameType | None) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()


def _die_with_parent(parent: int) -> Callable[[], None]:
    """A driver whose supervisor is gone must not go on alone: nobody would restart it or read its verdict."""

    def prepare() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return prepare
