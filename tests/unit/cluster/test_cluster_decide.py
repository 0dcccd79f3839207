"""The controller's rule, row by row: what it sees, what it does, and what it must not do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from argusrl.cluster import decide as rule
from argusrl.cluster.decide import GATES, TABLE, decide, table_rows
from argusrl.cluster.observation import Limits, Observation
from argusrl.recovery.decide import FINAL_CODES as FINAL_IN_THE_RUN

LIMITS = Limits(resubmissions=5, gpu_hours=100.0, capacity_wait_seconds=3600.0)
WELL = Observation()
SILENT = replace(WELL, silent_seconds=31.0)

CASES: dict[str, list[tuple[Observation, str]]] = {
    "storage_away": [
        (replace(SILENT, folder="away"), "wait"),
        (replace(SILENT, folder="away", head="none", job="failed"), "wait"),  # nothing could be recorded
    ],
    "damaged": [(replace(SILENT, folder="damaged", head="none"), "wait")],
    "stranger": [
        (replace(WELL, submission=0, stranger=True), "adopt"),
        (replace(WELL, ended=True, stranger=True, job="absent"), "adopt"),  # submitted again after an end
    ],
    "clear": [(replace(WELL, ended=True, clear=True), "clear")],
    "left_over": [(replace(WELL, ended=True, ended_seconds=301.0), "clear")],
    "ended": [
        (replace(WELL, ended=True, ended_seconds=299.0), "wait"),
        (replace(WELL, ended=True, ended_seconds=9e9, job="failed"), "wait"),
        (replace(SILENT, ended=True, head="none", job="failed"), "wait"),
        (replace(WELL, ended=True, clear=True, job="absent"), "wait"),
        (replace(WELL, ended=True, clear=True, job="failed"), "wait"),  # stays for people to look at
        (replace(WELL, submission=0, job="absent"), "wait"),
    ],
    "complete": [
        (replace(WELL, complete=True, exit_code=0, job="complete"), "end"),
        (replace(SILENT, complete=True, exit_code=0, job="failed", job_reason="JobStatusCheckTimeoutExceeded"), "end"),
        (replace(SILENT, complete=True, exit_code=0, job="absent", head="none"), "end"),
        (replace(WELL, complete=True, open_intent=True, job="absent"), "end"),  # it was alive, and finished
    ],
    "final_code": [
        (replace(WELL, exit_code=code, job=job), "end") for code in (2, 3, 4, 6, 10) for job in ("running", "failed")
    ],
    "carry_out": [
        (replace(WELL, open_intent=True, job="absent", head="none"), "carry_out"),
        (replace(WELL, open_intent=True, job="unknown"), "carry_out"),
    ],
    "api_unknown": [
        (replace(SILENT, job="unknown"), "wait"),
        (replace(SILENT, head="unknown"), "wait"),
        (replace(SILENT, head="running", node="unknown"), "wait"),
    ],
    "vanished": [
        (replace(SILENT, job="absent", head="none"), "end"),
        (replace(WELL, job="absent", exit_code=75, head="none"), "end"),
    ],
    "deleting": [(replace(SILENT, job="deleting", exit_code=75, head="none"), "wait")],
    "not_admitted": [
        (replace(SILENT, queued=True, admitted=False, job="suspended", head="none", exit_code=75), "wait"),
        (replace(SILENT, queued=True, admitted=False, job="starting", head="none", started=False), "wait"),
        (replace(SILENT, queued=True, admitted=False, job="running", head="none", silent_seconds=9e9), "wait"),
        (replace(WELL, queued=True, admitted=False, job="suspended", unschedulable_seconds=9e9), "wait"),
    ],
    "suspended": [(replace(SILENT, job="suspended", head="none", silent_seconds=9e9), "wait")],
    "retrying": [(replace(SILENT, job="retrying", head="none"), "wait")],
    "gpu_hours_spent": [(replace(WELL, gpu_hours=100.0), "end")],
    "invalid": [(replace(SILENT, job="invalid", started=False, head="none"), "end")],
    "deadline": [(replace(SILENT, job="failed", job_reason="DeadlineExceeded", exit_code=75), "end")],
    "job_stopped": [(replace(SILENT, job="failed", job_stopped=True, exit_code=75), "end")],
    "no_capacity": [
        (replace(WELL, job="starting", head="pending", started=False, unschedulable_seconds=3600.0), "end"),
    ],
    "pre_running_deadline": [
        (replace(SILENT, job="failed", job_reason="PreRunningDeadlineExceeded", started=False, head="none"), "resubmit")
    ],
    "fenced": [(replace(SILENT, exit_code=8, job="failed"), "resubmit")],
    "foreign_driver": [(replace(WELL, exit_code=8, job="failed", head="none"), "wait")],
    "interrupted": [
        (replace(WELL, exit_code=75, head="none"), "resubmit"),
        (replace(WELL, exit_code=75, job="failed", job_reason="AppFailed"), "resubmit"),
        (replace(WELL, exit_code=75, node="gone"), "resubmit"),
    ],
    "failed": [
        (replace(WELL, exit_code=code, job="failed", job_reason="AppFailed"), "resubmit")
        for code in (1, 5, 7, 9, 11, -9)
    ],
    "lost_sight": [
        (replace(WELL, job="failed", job_reason="JobStatusCheckTimeoutExceeded"), "resubmit"),  # it beats: fence first
        (replace(SILENT, job="failed", job_reason="JobStatusCheckTimeoutExceeded", head="none"), "resubmit"),
        (replace(WELL, job="failed", job_reason="JobDeploymentStatusTransitionGracePeriodExceeded"), "resubmit"),
    ],
    "job_failed": [
        (replace(SILENT, job="failed", job_reason="AppFailed", head="none"), "resubmit"),
        (replace(SILENT, job="failed", job_reason="SubmissionFailed", started=False), "resubmit"),
    ],
    "false_success": [
        (replace(SILENT, job="complete"), "resubmit"),
        (replace(SILENT, job="complete", head="none"), "resubmit"),
    ],
    "ending": [(replace(WELL, job="complete"), "wait"), (replace(WELL, job="failed", job_reason="AppFailed"), "wait")],
    "capacity": [
        (replace(SILENT, job="starting", head="pending", started=False, unschedulable_seconds=60.0), "wait"),
        (replace(SILENT, job="starting", head="pending", started=False, unschedulable_seconds=3599.0), "wait"),
    ],
    "head_lost": [
        (replace(SILENT, head="none"), "resubmit"),  # RayJob says Running, and would for ever
        (replace(SILENT, head="ended"), "resubmit"),
        (replace(SILENT, head="replaced"), "resubmit"),
        (replace(SILENT, head="leaving", node="unready"), "resubmit"),
        (replace(SILENT, head="running", node="gone"), "resubmit"),
        (replace(SILENT, head="none", started=False), "resubmit"),
    ],
    "partition": [
        (replace(WELL, head="none"), "wait"),
        (replace(WELL, node="unready"), "wait"),
        (replace(WELL, head="leaving", node="gone"), "wait"),
    ],
    "not_starting": [(replace(WELL, started=False, job="starting", head="pending", silent_seconds=1801.0), "resubmit")],
    "starting": [
        (replace(SILENT, started=False, job="starting", head="none"), "wait"),
        (replace(SILENT, started=True, job="starting", head="none", exit_code=75), "wait"),  # admitted again by Kueue
        (replace(SILENT, started=True, job="starting", head="none"), "wait"),
        (replace(SILENT, started=False, job="running"), "wait"),
        (replace(SILENT, started=True, job="starting", exit_code=8), "wait"),  # of a fenced driver that woke up
    ],
    "hung": [
        (replace(WELL, silent_seconds=901.0), "resubmit"),
        (replace(WELL, silent_seconds=901.0, exit_code=9), "resubmit"),
    ],
    "restarting": [(replace(SILENT, exit_code=code), "wait") for code in (8, 9, 75)],
    "stalled": [(replace(WELL, silent_seconds=121.0), "wait")],
    "well": [
        (WELL, "wait"),
        (replace(WELL, silent_seconds=60.0), "wait"),
        (replace(WELL, head="leaving"), "wait"),
        (replace(WELL, unschedulable_seconds=9e9), "wait"),  # goes on with fewer ranks
    ],
    "resubmissions_spent": [(replace(SILENT, head="none", resubmissions=5), "end")],
    "futile": [
        (replace(WELL, exit_code=9, job="failed", fruitless=2, blamed=2, silent_seconds=9e9), "end"),
    ],
    "back_off": [
        (replace(WELL, exit_code=9, job="failed", fruitless=1, blamed=1), "wait"),
        (replace(SILENT, head="none", fruitless=2, silent_seconds=59.0), "wait"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "seen", "action"),
    [(row, seen, action) for row, cases in CASES.items() for seen, action in cases],
    ids=[f"{row}-{number}" for row, cases in CASES.items() for number in range(len(cases))],
)
def test_every_row(row: str, seen: Observation, action: str):
    decision = decide(seen, LIMITS)
    assert (decision.row, decision.action) == (row, action)


def test_every_row_has_a_case():
    assert list(CASES) == [row.name for row in (*TABLE, *GATES)]


def test_rows_are_documented_once():
    rows = table_rows()
    assert len({row[0] for row in rows}) == len(rows)
    assert all(all(row) for row in rows)


def test_codes_that_end_a_run_for_good_are_those_of_the_supervisor():
    assert rule.FINAL_CODES | {8} == FINAL_IN_THE_RUN


def test_a_lost_head_is_never_futile_but_waits_longer_each_time():
    seen = replace(SILENT, head="none", fruitless=4, blamed=0)
    assert decide(seen, LIMITS).row == "back_off"
    assert decide(replace(seen, silent_seconds=241.0), LIMITS).action == "resubmit"


def test_a_step_forgives_everything():
    seen = replace(WELL, exit_code=9, job="failed", fruitless=9, blamed=9, steps_ahead=1)
    assert decide(seen, LIMITS).action == "resubmit"


def test_back_off_doubles_up_to_a_limit():
    waits = [rule.back_off_seconds(replace(WELL, fruitless=count)) for count in range(8)]
    assert waits == [0.0, 30.0, 60.0, 120.0, 240.0, 480.0, 900.0, 900.0]


def test_resubmitting_out_of_a_queue_says_what_it_costs():
    assert "gives up the quota" in decide(replace(SILENT, head="none", queued=True), LIMITS).reason
    assert "quota" not in decide(replace(SILENT, head="none"), LIMITS).reason


def test_a_gate_says_what_was_wanted():
    reason = decide(replace(SILENT, head="none", resubmissions=5), LIMITS).reason
    assert "cluster.budget.resubmissions is spent" in reason
    assert "head_lost" in reason


def test_without_a_limit_gpu_hours_never_end_a_run():
    assert decide(replace(WELL, gpu_hours=1e9), Limits()).row == "well"


def every_observation():
    """All that could be seen, coarsely: the safety rules below hold for each."""
    for folder, job, head, node in product(
        ("well", "away"),
        ("absent", "unknown", "starting", "running", "complete", "failed", "suspended", "deleting"),
        ("running", "none", "leaving", "replaced", "unknown"),
        ("well", "unready", "gone"),
    ):
        for code, silent, started, admitted, intent in product(
            (None, 0, 2, 8, 9, 75), (0.0, 31.0, 2000.0), (True, False), (True, False), (True, False)
        ):
            yield Observation(
                folder=folder, job=job, head=head, node=node, exit_code=code, complete=code == 0,
                silent_seconds=silent, started=started, queued=not admitted, admitted=admitted, open_intent=intent,
            )  # fmt: skip


def test_what_may_never_happen():
    for seen in every_observation():
        decision = decide(seen, LIMITS)
        if decision.action == "resubmit":
            assert (seen.folder, seen.complete, seen.open_intent, seen.admitted) == ("well", False, False, True), seen
            assert seen.job not in ("absent", "unknown", "suspended", "deleting"), seen
            assert seen.exit_code not in rule.FINAL_CODES, seen
            lives = seen.silent_seconds == 0 and seen.exit_code is None
            assert not lives, seen
        if not seen.admitted:
            assert decision.action in ("wait", "end", "carry_out"), seen
