"""Keeps a run going: starts the driver process, watches it, decides by decide.py, starts it again.

It imports neither Ray nor torch, so it stays alive when they do not. In a local run it also owns the Ray head, which
outlives drivers: the next one finds the engines and ranks of the one before still alive.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from argusrl.cluster.local import LocalHead
from argusrl.config.load import write_resolved
from argusrl.config.sections import ClusterSection, Config
from argusrl.errors import ArgusError, ClusterError, DeadlineError, FencedError, Interrupted, StorageError
from argusrl.journal.attempts import Verdict, next_attempt, read_heartbeat, read_verdict, write_verdict
from argusrl.journal.epochs import newest_epoch
from argusrl.recovery.decide import FINAL_CODES, AttemptEnd, decide_attempt, signal_name
from argusrl.recovery.storage_wait import storage_problem, write_problem
from argusrl.storage.layout import RunFolder
from argusrl.storage.sealed_json import read_sealed

DRIVER = (sys.executable, "-m", "argusrl.training.driver")  # + run folder, number of the attempt
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 1.0  # between two looks at heartbeat and head; the end of the driver itself is seen at once
_HEAD_LOSS_SECONDS = 5.0  # a driver that lost its head ends by itself, or else is ended after this long
_PAUSE_SECONDS = 0.2  # between two looks at a run folder that is away


def supervise(folder: RunFolder, config: Config, *, say: Callable[[str], None], debug: bool = False) -> int:
    """Run drivers of `folder` until one completes or the rule says stop; the exit code of the whole command.

    Raises StorageError when the run folder stays away, ClusterError when no process can be started.
    """
    with _Signals(config.recovery.grace_seconds) as signals, _Head(config.cluster) as head:
        return _Supervisor(folder, config, say, debug, signals, head).run()


@dataclass(slots=True)
class _Supervisor:
    folder: RunFolder
    config: Config
    say: Callable[[str], None]
    debug: bool
    signals: _Signals
    head: _Head
    first_epoch: int = 0
    own_attempts: set[int] = field(default_factory=set)
    storage_well_at: float = field(default_factory=time.monotonic)  # a driver may have waited for it already

    def run(self) -> int:
        history: list[AttemptEnd] = []
        self.first_epoch = newest_epoch(self.folder)
        while not self.signals.asked_to_stop:
            environment = self.head.environment()  # starts the head: it comes up while the driver checks its input
            attempt = self._begin()
            if attempt is None:
                break
            end = self._run_attempt(attempt, environment)
            if self.signals.asked_to_stop and end.exit_code != 0:
                # Whatever became of the driver the same command resumes, unless it would meet the same end again.
                return end.exit_code if end.exit_code in FINAL_CODES else Interrupted.exit_code
            history.append(end)
            decision = decide_attempt(history, self.config.recovery)
            if decision.action == "stop":
                self._tell_stop(decision.reason, decision.exit_code, end)
                return decision.exit_code
            rival = self._rival()
            if rival is not None:
                self._tell_stop(f"attempt {rival} of another supervisor took over", FencedError.exit_code, end)
                return FencedError.exit_code
            if end.exit_code == ClusterError.exit_code:
                self.head.stop()  # it may be what is broken; the next attempt gets another
            self.say(f"Restarting ({len(history)}): {decision.reason}")
        return Interrupted.exit_code

    def _tell_stop(self, reason: str, code: int, end: AttemptEnd) -> None:
        if code == FencedError.exit_code:
            self.say(f"Stopped: another argusrl train drives this run now and goes on with it ({reason})")
        elif code not in (0, Interrupted.exit_code) and reason != end.message:  # the driver has told its own fault
            self.say(f"Stopped: {reason}")

    def _begin(self) -> int | None:
        """The number of the next attempt, its folder made; waits for storage. None when asked to stop meanwhile."""
        limit, said = self.config.recovery.storage_wait_seconds, ""
        deadline = self.storage_well_at + limit
        while not self.signals.asked_to_stop:
            # Whether the commits are there is for the driver to see.
            problem = storage_problem(self.folder, "", self.config.recovery.min_free_bytes)
            if problem is None:
                try:
                    attempt = next_attempt(self.folder)
                    write_resolved(self.config, self.folder.attempt(attempt) / "config.yaml")
                except StorageError as error:
                    problem = error.message
                else:
                    self.own_attempts.add(attempt)
                    return attempt
            if time.monotonic() > deadline:
                raise StorageError(f"{problem}; waited {limit:.0f} s", "mend it and run the same command: it resumes")
            if problem != said:
                self.say(f"Waiting for the run folder: {problem}")
                said = problem
            time.sleep(_PAUSE_SECONDS)
        return None

    def _run_attempt(self, attempt: int, environment: dict[str, str]) -> AttemptEnd:
        command = [*DRIVER, str(self.folder.path), str(attempt)]
        if len(self.own_attempts) > 1:
            command.append("--restarted")
        process = subprocess.Popen(
            command + (["--debug"] if self.debug else []),
            env={**os.environ, **environment},
            # A session of its own: Ctrl-C reaches the supervisor alone, which asks the driver to seal and stop.
            start_new_session=True,
            preexec_fn=_die_with_parent(os.getpid()),
        )
        self.signals.forward_to(process)
        watch = _Watch(self.folder, attempt, self.config)
        fault: ArgusError | None = None
        while not _ended(process, _LOOK_SECONDS):
            fault = fault or watch.silence() or self.head.loss()
            if fault is not None:
                process.kill()
        verdict = _verdict(self.folder, attempt, process.returncode, fault)
        self.storage_well_at = watch.beat_at if verdict.exit_code == StorageError.exit_code else time.monotonic()
        return AttemptEnd(
            exit_code=verdict.exit_code,  # a driver that crashed while it cleaned up after itself has ended as it says
            ended_at=time.time(),
            committed_steps=verdict.step or 0,
            error=verdict.error,
            message=verdict.reason.partition("\n")[0],
        )

    def _rival(self) -> int | None:
        """The attempt of another supervisor that claimed the run after this one began and has not ended, if any.

        Starting one more driver would fence it, and it this one, for ever in turn.
        """
        newest = newest_epoch(self.folder)
        if newest <= self.first_epoch:
            return None
        try:
            attempt = read_sealed(self.folder.epoch(newest)).get("attempt")
            if not isinstance(attempt, int) or attempt in self.own_attempts:
                return None
            return attempt if read_verdict(self.folder, attempt) is None else None
        except StorageError:  # the next driver meets it, too, and says what is wrong
            return None


def _verdict(folder: RunFolder, attempt: int, code: int, fault: ArgusError | None) -> Verdict:
    """What the driver wrote about its own end; a killed one wrote nothing, so the supervisor does.

    `fault` is why the supervisor itself killed it, if it did.
    """
    killed = code < 0
    reason = f"killed by {signal_name(-code)}" if killed else f"the driver ended with code {code}"
    own = Verdict(
        outcome="killed" if killed else "failed",
        exit_code=code if fault is None else fault.exit_code,
        reason=reason if fault is None else f"{fault.message}; killed",
        error="" if fault is None else type(fault).__name__,
        step=count_commits(folder),
        time=time.time(),
    )
    try:
        return read_verdict(folder, attempt) or write_verdict(folder, attempt, own)
    except StorageError:  # the run goes on without it
        return own


def count_commits(folder: RunFolder) -> int:
    """Committed training steps, by name only."""
    step = 0
    while folder.commit(step + 1).exists():
        step += 1
    return step


class _Watch:
    """Whether the driver of an attempt still beats. What counts is that its heartbeat changes: clocks may jump."""

    def __init__(self, folder: RunFolder, attempt: int, config: Config) -> None:
        self.folder, self.attempt = folder, attempt
        self.limit_seconds = config.recovery.driver_silence_seconds
        self.start_seconds = config.cluster.start_timeout_seconds  # until the first beat
        self.last_beat = 0.0
        self.beat_at = self.changed_at = time.monotonic()

    def silence(self) -> DeadlineError | None:
        """Why the driver must be taken for hung; None while it need not be."""
        try:
            heartbeat = read_heartbeat(self.folder, self.attempt)
        except (StorageError, OSError):
            heartbeat = None
        now = time.monotonic()
        if heartbeat is not None and heartbeat.time != self.last_beat:
            self.last_beat, self.beat_at, self.changed_at = heartbeat.time, now, now
        limit = self.limit_seconds + (0.0 if self.last_beat else self.start_seconds)
        if now - self.changed_at <= limit:
            return None
        # A driver cannot beat into a full or lost run folder: that is not its fault, and it waits there by itself.
        if not self.folder.config.exists() or write_problem(self.folder):
            self.changed_at = now
            return None
        return DeadlineError(f"no heartbeat of the driver for {limit:.0f} s (recovery.driver_silence_seconds)")


class _Head:
    """The Ray head of a local run, over all its attempts; nothing where the run joins a cluster."""

    def __init__(self, section: ClusterSection) -> None:
        self.section = section
        self.head: LocalHead | None = None
        self.lost_at: float | None = None

    def __enter__(self) -> _Head:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def environment(self) -> dict[str, str]:
        """Variables for a driver. Starts the head if there is none, or none that lives. Raises ClusterError."""
        if self.section.address != "local":
            return {}
        if self.head is not None and not self.head.alive():
            self.stop()
        if self.head is None:
            self.head = LocalHead.start(self.section)
        return self.head.environment

    def loss(self) -> ClusterError | None:
        """Why a driver must end although it goes on: its head has been gone for a while. None otherwise."""
        if self.head is None or self.head.alive():
            return None
        now = time.monotonic()
        self.lost_at = self.lost_at or now
        return ClusterError("the local Ray head died") if now - self.lost_at > _HEAD_LOSS_SECONDS else None

    def stop(self) -> None:
        """End the head and everything it started."""
        if self.head is not None:
            self.head.stop()
        self.head = self.lost_at = None


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


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until the process has ended, or so long; without looking again and again."""
    if process.poll() is not None:
        return True
    if sys.platform != "linux":
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:  # a signal handler buried it meanwhile
        return process.poll() is not None
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(1000 * seconds)
    finally:
        os.close(descriptor)
    return process.poll() is not None


def _die_with_parent(parent: int) -> Callable[[], None]:
    """A driver whose supervisor is gone must not go on alone: nobody would restart it or read its verdict."""

    def prepare() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return prepare
