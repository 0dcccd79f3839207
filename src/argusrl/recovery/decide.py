"""What to do when an attempt ended: a pure function of how it and the attempts before it ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from argusrl.errors import ClusterError, DeadlineError, Interrupted, WorkerError

SAME_FAULT_LIMIT = 3  # attempts in a row that end alike without a committed step in between
RETRIED_CODES = frozenset({1, ClusterError.exit_code, WorkerError.exit_code, DeadlineError.exit_code})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How one driver process ended."""

    exit_code: int  # negative: killed by that signal
    ended_at: float  # seconds since the epoch
    committed_steps: int  # when it ended
    error: str = ""  # class of the exception
    message: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """`restart` a new driver, or `stop` with the exit code; `reason` is for people."""

    action: Literal["restart", "stop"]
    exit_code: int
    reason: str


def decide(history: Sequence[AttemptEnd], *, max_restarts: int, window_seconds: float) -> Decision:
    """The rule after the last attempt of `history` ended.

    A finished run, a user's mistake, corruption, bad numbers and fencing are final. Killed drivers and broken
    workers are tried again, at most `max_restarts` times in `window_seconds`, and not when attempts end alike again
    and again without a committed step in between.
    """
    last = history[-1]
    if last.exit_code == 0:
        return Decision("stop", 0, "the run is complete")
    if last.exit_code == Interrupted.exit_code:
        return Decision("stop", last.exit_code, "interrupted; the same command resumes it")
    if last.exit_code > 0 and last.exit_code not in RETRIED_CODES:
        return Decision("stop", last.exit_code, last.message or f"ended with code {last.exit_code}")
    what = _describe(last)
    alike = [(end.exit_code, end.error, end.committed_steps) for end in history[-SAME_FAULT_LIMIT:]]
    if last.exit_code > 0 and len(alike) == SAME_FAULT_LIMIT and len(set(alike)) == 1:
        reason = f"{what}; {SAME_FAULT_LIMIT} attempts ended like this at step {last.committed_steps}"
        return Decision("stop", last.exit_code, f"{reason}: trying again would not help")
    recent = [end for end in history if end.exit_code != 0 and last.ended_at - end.ended_at <= window_seconds]
    if len(recent) > max_restarts:
        return Decision(
            "stop",
            abs(last.exit_code) if last.exit_code > 0 else WorkerError.exit_code,
            f"{what}; recovery.max_restarts = {max_restarts} in {window_seconds:.0f} s is used up",
        )
    return Decision("restart", 0, what)


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no names."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _describe(end: AttemptEnd) -> str:
    if end.exit_code < 0:
        return f"the driver was killed by {signal_name(-end.exit_code)}"
    return end.message or f"the driver ended with code {end.exit_code}"
