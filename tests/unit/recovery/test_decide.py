from __future__ import annotations

import signal

import pytest

from argusrl.recovery.decide import AttemptEnd, decide

RULE = {"max_restarts": 3, "window_seconds": 100.0}


def end(code: int, *, at: float = 0.0, steps: int = 0, error: str = "", message: str = "") -> AttemptEnd:
    return AttemptEnd(exit_code=code, ended_at=at, committed_steps=steps, error=error, message=message)


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 6, 8, 10, 75])
def test_what_trying_again_cannot_mend_is_final(code):
    decision = decide([end(code)], **RULE)
    assert (decision.action, decision.exit_code) == ("stop", code)


@pytest.mark.parametrize("code", [1, 7, 9, 11, -signal.SIGKILL, -signal.SIGSEGV])
def test_killed_drivers_and_broken_workers_are_restarted(code):
    assert decide([end(code)], **RULE).action == "restart"


def test_the_reason_names_the_signal():
    assert "SIGKILL" in decide([end(-9)], **RULE).reason


def test_the_same_fault_three_times_at_one_step_stops():
    history = [end(9, at=t, steps=4, error="EngineError", message=f"port {t}") for t in range(3)]
    assert decide(history[:2], **RULE).action == "restart"
    decision = decide(history, **RULE)
    assert (decision.action, decision.exit_code) == ("stop", 9)
    assert "step 4" in decision.reason


@pytest.mark.parametrize("change", [{"steps": 5}, {"error": "DeadlineError"}])
def test_progress_or_another_fault_goes_on(change):
    history = [end(9, steps=4, error="EngineError")] * 2
    assert decide([*history, end(9, **{"steps": 4, "error": "EngineError", **change})], **RULE).action == "restart"


def test_the_restart_budget_counts_within_its_window():
    kills = [end(-9, at=10.0 * n, steps=n) for n in range(4)]
    decision = decide(kills, **RULE)
    assert (decision.action, decision.exit_code) == ("stop", 9)
    assert "max_restarts" in decision.reason
    spread = [end(-9, at=60.0 * n, steps=n) for n in range(8)]
    assert decide(spread, **RULE).action == "restart"
