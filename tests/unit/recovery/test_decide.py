from __future__ import annotations

import random
import re
import signal
from typing import get_args

import pytest

from argusrl.config.sections import RecoverySection
from argusrl.recovery import decide as module
from argusrl.recovery.decide import FINAL_CODES, AttemptEnd, decide, decide_attempt
from argusrl.recovery.faults import Fault, FaultHow, FaultKind

RULE = RecoverySection(max_restarts=3, max_heals=5, window_seconds=100.0)


def end(code: int, *, at: float = 0.0, steps: int = 0, error: str = "", message: str = "") -> AttemptEnd:
    return AttemptEnd(exit_code=code, ended_at=at, committed_steps=steps, error=error, message=message)


def fault(kind: FaultKind, member: str = "0", *, how: FaultHow = "died", step: int = 0, at: float = 0.0) -> Fault:
    return Fault(kind=kind, member=member, how=how, step=step, time=at, message=f"{kind} {member} {how}")


@pytest.mark.parametrize("code", [0, 2, 3, 4, 6, 8, 10, 75])
def test_what_trying_again_cannot_mend_is_final(code):
    decision = decide_attempt([end(code)], RULE)
    assert (decision.action, decision.exit_code) == ("stop", code)


@pytest.mark.parametrize("code", [1, 5, 7, 9, 11, -signal.SIGKILL, -signal.SIGSEGV])
def test_killed_drivers_and_broken_workers_are_restarted(code):
    assert decide_attempt([end(code)], RULE).action == "restart_driver"


@pytest.mark.parametrize(("code", "error"), [(7, "NodesMissing"), (5, "StorageUnusable")])
def test_what_was_waited_for_in_vain_is_not_waited_for_again(code, error):
    decision = decide_attempt([end(code, error=error, message="it did not come")], RULE)
    assert (decision.action, decision.reason, decision.exit_code) == ("stop", "it did not come", code)


def test_storage_and_interruption_can_be_resumed_but_mistakes_cannot():
    assert {2, 3, 4, 6, 8, 10} == FINAL_CODES


def test_the_reason_names_the_signal():
    assert "SIGKILL" in decide_attempt([end(-9)], RULE).reason


def test_the_same_end_three_times_at_one_step_stops():
    history = [end(9, at=t, steps=4, error="EngineError", message=f"port {t}") for t in range(3)]
    assert decide_attempt(history[:2], RULE).action == "restart_driver"
    decision = decide_attempt(history, RULE)
    assert (decision.action, decision.exit_code) == ("stop", 9)
    assert "step 4" in decision.reason


@pytest.mark.parametrize("change", [{"steps": 5}, {"error": "DeadlineError"}])
def test_progress_or_another_end_goes_on(change):
    history = [end(9, steps=4, error="EngineError")] * 2
    last = end(9, **{"steps": 4, "error": "EngineError", **change})
    assert decide_attempt([*history, last], RULE).action == "restart_driver"


def test_the_restart_budget_counts_within_its_window():
    kills = [end(-9, at=10.0 * n, steps=n) for n in range(4)]
    decision = decide_attempt(kills, RULE)
    assert (decision.action, decision.exit_code) == ("stop", 9)
    assert "max_restarts" in decision.reason
    spread = [end(-9, at=60.0 * n, steps=n) for n in range(8)]
    assert decide_attempt(spread, RULE).action == "restart_driver"


def test_the_restart_budget_counts_without_a_committed_step_however_long_that_takes():
    kills = [end(-9, at=1000.0 * n, steps=7) for n in range(4)]
    assert decide_attempt(kills[:3], RULE).action == "restart_driver"
    assert decide_attempt(kills, RULE).action == "stop"


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        ("engine", "replace_engine"),
        ("rank", "recover"),
        ("episode_worker", "recover"),
        ("node", "wait"),
        ("driver", "restart_driver"),
        ("storage", "wait"),
        ("sample", "recover"),
        ("numerics", "stop"),
        ("corruption", "stop"),
    ],
)
@pytest.mark.parametrize("how", get_args(FaultHow))
def test_the_smallest_action_that_suffices_comes_first(kind, how, action):
    decision = decide([fault(kind, how=how)], RULE)
    assert decision.action == action
    assert decision.reason == f"{kind} 0 {how}"


def test_every_kind_has_its_row_in_the_table():
    rows = [line for line in (module.__doc__ or "").splitlines() if line.startswith("| ")]
    actions = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert actions == set(get_args(module.Action))
    assert len(rows) == 1 + len(get_args(FaultKind)) - 1  # a head; ranks and episode workers share a row


@pytest.mark.parametrize(("kind", "code"), [("corruption", 6), ("numerics", 10)])
def test_final_kinds_stop_with_their_code(kind, code):
    assert decide([fault("engine"), fault(kind)], RULE).exit_code == code


def test_the_same_fault_without_a_commit_escalates_and_a_commit_forgives():
    rank = [fault("rank", "1", step=4, at=t) for t in range(3)]
    assert decide(rank[:2], RULE).action == "recover"
    assert decide(rank, RULE).action == "restart_driver"
    assert decide([*rank, fault("rank", "1", step=5)], RULE).action == "recover"


def test_faults_of_different_members_are_not_the_same():
    assert decide([fault("engine", str(n)) for n in range(4)], RULE).action == "replace_engine"


def test_a_new_driver_starts_with_a_clean_slate_until_drivers_are_used_up():
    history: list[Fault] = []
    for _ in range(2):
        history += [fault("engine")] * 3
        assert decide(history, RULE).action == "restart_driver"
        history.append(fault("driver", "WorkerError", how="raised"))
        assert decide(history, RULE).action == "restart_driver"
    history += [*[fault("engine")] * 3, fault("driver", "WorkerError", how="raised")]
    assert decide(history, RULE).action == "stop"


def test_too_many_heals_in_a_window_restart_the_driver():
    history = [fault("engine", str(n), step=n, at=n) for n in range(6)]
    assert decide(history[:5], RULE).action == "replace_engine"
    decision = decide(history, RULE)
    assert decision.action == "restart_driver"
    assert "max_heals = 5" in decision.reason


def test_a_lost_node_is_waited_for_unless_the_run_may_shrink():
    assert decide([fault("node")], RULE).action == "wait"
    assert decide([fault("node")], RULE.model_copy(update={"min_ranks": 1})).action == "recover"


def test_a_sample_is_quarantined_after_its_attempts():
    rule = RULE.model_copy(update={"max_sample_attempts": 2})
    assert decide([fault("sample", "a")], rule).action == "recover"
    assert decide([fault("sample", "a"), fault("sample", "b")], rule).action == "recover"
    decision = decide([fault("sample", "a", step=6), fault("sample", "a", step=6)], rule)
    assert decision.action == "quarantine"
    assert "a ended step 7 2 times" in decision.reason


@pytest.mark.parametrize("seed", range(200))
def test_no_sequence_of_faults_without_commits_is_healed_for_ever(seed):
    """Whatever breaks, in whatever order and however slowly: the run ends after a bounded number of actions."""
    generator = random.Random(seed)
    history: list[Fault] = []
    kinds = [kind for kind in get_args(FaultKind) if kind not in ("corruption", "numerics", "driver")]
    actions = drivers = 0
    while True:
        actions += 1
        assert actions <= (RULE.max_heals + 2) * (RULE.max_restarts + 2), f"seed {seed}"
        at = actions * generator.choice([0.1, 1000.0])
        history.append(
            fault(generator.choice(kinds), f"{generator.random()}", how=generator.choice(get_args(FaultHow)), at=at)
        )
        decision = decide(history, RULE)
        if decision.action == "restart_driver":
            drivers += 1
            how = generator.choice(get_args(FaultHow))
            history.append(fault("driver", generator.choice("ab"), how=how, at=at))
            decision = decide(history, RULE)
        if decision.action == "stop":
            break
    assert 1 <= drivers <= RULE.max_restarts + 1


@pytest.mark.parametrize("seed", range(50))
def test_ever_more_of_the_same_never_gets_a_smaller_action(seed):
    generator = random.Random(seed)
    ladder = ["replace_engine", "recover", "wait", "quarantine", "restart_driver", "stop"]
    one = fault(generator.choice(get_args(FaultKind)), how=generator.choice(get_args(FaultHow)))
    ranks = [ladder.index(decide([one] * length, RULE).action) for length in range(1, 12)]
    assert ranks == sorted(ranks)
