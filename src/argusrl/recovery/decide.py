"""What to do about a fault: a pure function of it and the faults before it.

| what broke | first | the same again and again, or too often |
|---|---|---|
| an engine | `replace_engine`: the others go on, its unfinished replies continue elsewhere | `restart_driver` |
| a rank, an episode worker | `recover`: a new epoch, what broke is re-made, the rest stays | `restart_driver` |
| a node | `recover` with fewer ranks if `recovery.min_ranks` is set, else `wait` for another | `restart_driver` |
| the driver | `restart_driver`: it attaches to the living workers of its run | `stop` |
| storage: full, or gone | `wait` until it is back | `restart_driver` |
| a sample that ends its step | `recover` | `quarantine`, after `recovery.max_sample_attempts` |
| numbers that the rule does not skip | `stop` | |
| bytes that do not match their digest | `stop` | |

"The same" is kind, member and how it broke, SAME_FAULT_LIMIT times without a committed step in between; a driver that
was killed from outside is never "the same". "Too often" is more than `recovery.max_heals` (in the driver) or
`recovery.max_restarts` (of drivers) per `recovery.window_seconds`, and also without a committed step in between,
however long that takes: so no sequence of faults keeps a run busy for ever that gets nowhere. A driver starts with a
clean slate: what was healed before it does not count.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from argusrl.config.sections import RecoverySection
from argusrl.errors import (
    ClusterError,
    ConfigError,
    CorruptionError,
    DataError,
    DeadlineError,
    FencedError,
    Interrupted,
    ModelError,
    NodesMissing,
    NumericsError,
    StorageError,
    StorageUnusable,
    WorkerError,
)
from argusrl.recovery.faults import Fault, FaultKind

Action = Literal["replace_engine", "recover", "restart_driver", "wait", "quarantine", "stop"]

SAME_FAULT_LIMIT = 3
RETRIED_CODES = frozenset(
    {1, StorageError.exit_code, ClusterError.exit_code, WorkerError.exit_code, DeadlineError.exit_code}
)
WAITED_FOR = frozenset({NodesMissing.__name__, StorageUnusable.__name__})  # trying again would only wait again
# What the same command would meet again: a person, or another driver, has to act first.
FINAL_CODES = frozenset(
    kind.exit_code for kind in (ConfigError, DataError, ModelError, CorruptionError, FencedError, NumericsError)
)

_FIRST: dict[FaultKind, Action] = {
    "engine": "replace_engine",
    "rank": "recover",
    "episode_worker": "recover",
    "node": "wait",
    "storage": "wait",
    "sample": "recover",
}
_STOP_CODES: dict[FaultKind, int] = {
    "corruption": CorruptionError.exit_code,
    "numerics": NumericsError.exit_code,
    "storage": StorageError.exit_code,
    "node": ClusterError.exit_code,
}


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do next; `reason` is for people, `exit_code` is the run's if `action` is stop."""

    action: Action
    reason: str
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How one driver process ended."""

    exit_code: int  # negative: killed by that signal
    ended_at: float  # seconds since 1970
    committed_steps: int  # when it ended
    error: str = ""  # class of the exception
    message: str = ""


def decide(history: Sequence[Fault], settings: RecoverySection) -> Decision:
    """The rule after the last fault of `history` (oldest first): the table above."""
    fault = history[-1]
    if fault.kind in ("corruption", "numerics"):
        return _stop(fault, fault.message)
    if fault.kind == "driver":
        return _after_driver(fault, [earlier for earlier in history if earlier.kind == "driver"], settings)
    healed = _since_driver_start(history)
    if _recent(healed, fault, settings.window_seconds) > settings.max_heals:
        return Decision("restart_driver", f"{fault.message}; {_used_up('max_heals', settings.max_heals, settings)}")
    again = sum(fault.like(earlier) for earlier in healed)
    if fault.kind == "sample" and again >= settings.max_sample_attempts:
        return Decision("quarantine", f"{fault.message}; {fault.member} ended step {fault.step + 1} {again} times")
    if fault.kind != "sample" and again >= SAME_FAULT_LIMIT:
        return Decision("restart_driver", f"{fault.message}; {again} times without a committed step in between")
    if fault.kind == "node" and settings.min_ranks is not None:
        return Decision("recover", fault.message)
    return Decision(_FIRST[fault.kind], fault.message)


def decide_attempt(history: Sequence[AttemptEnd], settings: RecoverySection) -> Decision:
    """The supervisor's part, after the last driver of `history` ended: restart_driver or stop.

    A finished run, a user's mistake, corruption, bad numbers, storage that stayed away and fencing are final.
    """
    last = history[-1]
    if last.exit_code == 0:
        return Decision("stop", "the run is complete")
    if last.exit_code == Interrupted.exit_code:
        return Decision("stop", "interrupted; the same command resumes it", last.exit_code)
    if last.exit_code > 0 and (last.exit_code not in RETRIED_CODES or last.error in WAITED_FOR):
        return Decision("stop", last.message or f"ended with code {last.exit_code}", last.exit_code)
    decision = decide([_fault(end) for end in history if end.exit_code != 0], settings)
    if decision.action == "stop" and last.exit_code > 0:
        return Decision("stop", decision.reason, last.exit_code)
    return decision


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no names."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _after_driver(fault: Fault, drivers: Sequence[Fault], settings: RecoverySection) -> Decision:
    again = sum(fault.like(earlier) for earlier in drivers)
    if fault.how != "died" and again >= SAME_FAULT_LIMIT:
        alike = f"{again} attempts ended like this at step {fault.step}"
        return _stop(fault, f"{fault.message}; {alike}: trying again would not help")
    if _recent(drivers, fault, settings.window_seconds) > settings.max_restarts:
        return _stop(fault, f"{fault.message}; {_used_up('max_restarts', settings.max_restarts, settings)}")
    return Decision("restart_driver", fault.message)


def _since_driver_start(history: Sequence[Fault]) -> list[Fault]:
    drivers = [index for index, fault in enumerate(history) if fault.kind == "driver"]
    return list(history[drivers[-1] + 1 if drivers else 0 :])


def _recent(history: Sequence[Fault], last: Fault, window_seconds: float) -> int:
    return sum(last.time - fault.time <= window_seconds or fault.step == last.step for fault in history)


def _used_up(name: str, value: int, settings: RecoverySection) -> str:
    return f"recovery.{name} = {value} in {settings.window_seconds:.0f} s or one step is used up"


def _stop(fault: Fault, reason: str) -> Decision:
    return Decision("stop", reason, _STOP_CODES.get(fault.kind, WorkerError.exit_code))


def _fault(end: AttemptEnd) -> Fault:
    killed = end.exit_code < 0
    message = end.message or f"the driver ended with code {end.exit_code}"
    return Fault(
        kind="driver",
        member=f"{end.error or 'driver'} ({end.exit_code})",
        how="died" if killed else "raised",
        step=end.committed_steps,
        time=end.ended_at,
        message=f"the driver was killed by {signal_name(-end.exit_code)}" if killed else message,
    )
