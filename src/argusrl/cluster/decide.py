"""What a controller does about a run on a cluster: a pure function of what it sees. The rows of `TABLE` are the rule.

Evidence counts in this order: the run folder, the head pod and its node, the status of the RayJob last. A RayJob has
no exit code, looks away for 300 s before it gives up on a head that is gone, and may say Running for ever.

No row compares clocks. `silent_seconds` is how long the controller, by its own clock, has not seen a heartbeat change.
"""

from __future__ import annotations

from dataclasses import dataclass

from argusrl.cluster.observation import SILENT_SECONDS, Action, Limits, Observation, Row
from argusrl.errors import (
    ConfigError,
    CorruptionError,
    DataError,
    FencedError,
    Interrupted,
    ModelError,
    NumericsError,
)

HUNG_SECONDS = 900.0  # the head lives, its driver does not: the supervisor in it should have acted long before
START_SECONDS = 1800.0  # all pods have nodes, and no driver yet
LEFT_OVER_SECONDS = 300.0  # for a job to end by itself after its run did
UNDER_WAY = ("starting", "running", "suspended", "retrying")  # states of a job that may hold pods
FUTILE_SUBMISSIONS = 3  # in a row that ended by themselves without a committed step
_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 30.0, 900.0

# What the same recipe would meet again on any node: a person has to act first.
FINAL_CODES = frozenset(kind.exit_code for kind in (ConfigError, DataError, ModelError, CorruptionError, NumericsError))


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. `row` names the row of the table, `reason` says it with the values."""

    action: Action
    row: str
    reason: str
    outcome: str = ""
    tell: bool = False
    clear: bool = False


def _failed_by_itself(seen: Observation) -> bool:
    return seen.exit_code is not None and seen.exit_code not in (0, Interrupted.exit_code, FencedError.exit_code)


TABLE: tuple[Row, ...] = (
    # The run folder.
    Row(
        "storage_away",
        "the run folder cannot be read",
        "wait",
        "nothing can be known or recorded; drivers wait for it, too",
        lambda seen, _: seen.folder == "away",
        tell=True,
    ),
    Row(
        "damaged",
        "a record of the run folder does not match its seal",
        "wait",
        "a person has to look: argusrl runs verify",
        lambda seen, _: seen.folder == "damaged",
        tell=True,
    ),
    Row(
        "stranger",
        "a live RayJob of the run that no record knows",
        "adopt",
        "a person submitted the run",
        lambda seen, _: seen.stranger,
    ),
    Row(
        "clear",
        "an end is on record that takes the job with it, and the job is under way",
        "clear",
        "the run ended",
        lambda seen, _: seen.ended and seen.clear and seen.job in UNDER_WAY,
    ),
    Row(
        "left_over",
        "an end is on record, and 300 s later the job is still under way by its status",
        "clear",
        "KubeRay has lost sight of the job; its pods would hold their GPUs for ever",
        lambda seen, _: seen.ended_seconds >= LEFT_OVER_SECONDS and seen.job in UNDER_WAY,
    ),
    Row("ended", "an end is on record", "wait", "the run ended", lambda seen, _: seen.ended or seen.submission == 0),
    Row(
        "complete",
        "the newest verdict says complete",
        "end",
        "the run reached its end, whatever its job says",
        lambda seen, _: seen.complete,
        outcome="complete",
        tell=True,
    ),
    Row(
        "final_code",
        "the verdict has exit code 2, 3, 4, 6 or 10",
        "end",
        "the same recipe would meet the same end on any node",
        lambda seen, _: seen.exit_code in FINAL_CODES,
        outcome="failed",
        tell=True,
    ),
    Row(
        "carry_out",
        "a submission is on record, its object has not been seen",
        "carry_out",
        "an intent is carried out by whoever finds it",
        lambda seen, _: seen.open_intent,
    ),
    Row(
        "api_unknown",
        "the API server does not say how the job stands",
        "wait",
        "nothing is done on a guess",
        lambda seen, _: seen.job == "unknown" or seen.head == "unknown" or seen.node == "unknown",
    ),
    Row(
        "vanished",
        "the object of the submission was there and is gone; no controller meant that, nor KubeRay after its end",
        "end",
        "a person stopped the run by deleting it",
        lambda seen, _: seen.job == "absent",
        outcome="stopped",
        tell=True,
    ),
    Row(
        "deleting",
        "the object of the submission is being deleted",
        "wait",
        "what was meant shows when it is gone",
        lambda seen, _: seen.job == "deleting",
    ),
    # Waiting that is no failure.
    Row(
        "not_admitted",
        "Kueue has suspended the job, or not admitted it yet",
        "wait",
        "it waits for quota, and goes on by itself when admitted; submitting it again would lose its place",
        lambda seen, _: seen.queued and not seen.admitted,
    ),
    Row(
        "suspended",
        "the job is suspended outside of Kueue",
        "wait",
        "a person suspended it, a person resumes it",
        lambda seen, _: seen.job == "suspended",
    ),
    Row(
        "retrying",
        "KubeRay retries the job by itself",
        "wait",
        "backoffLimit is not 0 in this manifest: two that resubmit would work against each other",
        lambda seen, _: seen.job == "retrying",
        tell=True,
    ),
    Row(
        "gpu_hours_spent",
        "cluster.budget.gpu_hours is spent",
        "end",
        "the budget of the recipe",
        lambda seen, limits: limits.gpu_hours is not None and seen.gpu_hours >= limits.gpu_hours,
        outcome="budget",
        tell=True,
        clear=True,
    ),
    # What the job says before a driver exists.
    Row(
        "invalid",
        "ValidationFailed",
        "end",
        "KubeRay refuses the manifest, and would again",
        lambda seen, _: seen.job == "invalid",
        outcome="failed",
        tell=True,
    ),
    Row(
        "deadline",
        "DeadlineExceeded",
        "end",
        "activeDeadlineSeconds of the manifest is over",
        lambda seen, _: seen.job == "failed" and seen.job_reason == "DeadlineExceeded",
        outcome="stopped",
        tell=True,
    ),
    Row(
        "job_stopped",
        "Ray says STOPPED",
        "end",
        "a person stopped the job",
        lambda seen, _: seen.job_stopped,
        outcome="stopped",
        tell=True,
    ),
    Row(
        "no_capacity",
        "pods fit nowhere for cluster.budget.capacity_wait_seconds",
        "end",
        "waiting has its limit",
        lambda seen, limits: not seen.begun and (seen.unschedulable_seconds or 0.0) >= limits.capacity_wait_seconds,
        outcome="capacity",
        tell=True,
        clear=True,
    ),
    Row(
        "pre_running_deadline",
        "PreRunningDeadlineExceeded",
        "resubmit",
        "the pods did not get up in time; KubeRay gave up waiting, the run does not",
        lambda seen, _: seen.job == "failed" and seen.job_reason == "PreRunningDeadlineExceeded",
    ),
    # The driver has ended.
    Row(
        "fenced",
        "exit code 8, the job is over or its head gone, and no heartbeat of the run changes",
        "resubmit",
        "another driver took the run and is gone, too",
        lambda seen, _: seen.exit_code == FencedError.exit_code and seen.over and seen.silent,
    ),
    Row(
        "foreign_driver",
        "exit code 8, the job is over or its head gone",
        "wait",
        "another driver has the run and goes on with it",
        lambda seen, _: seen.exit_code == FencedError.exit_code and seen.over,
    ),
    Row(
        "interrupted",
        "exit code 75, and the job is over or its head gone",
        "resubmit",
        "an eviction, a drain or a reboot ended it with everything sealed",
        lambda seen, _: seen.exit_code == Interrupted.exit_code and seen.over,
    ),
    Row(
        "failed",
        "another exit code, and the job is over or its head gone",
        "resubmit",
        "the supervisor gave up on this cluster of pods; new ones may do better",
        lambda seen, _: _failed_by_itself(seen) and seen.over,
    ),
    # The job has failed, by its status, and no verdict says why.
    Row(
        "lost_sight",
        "JobStatusCheckTimeoutExceeded or JobDeploymentStatusTransitionGracePeriodExceeded",
        "resubmit",
        "KubeRay gave up on the head and takes the pods down; if the driver lives, the fence ends it first",
        lambda seen, _: (
            seen.job == "failed"
            and seen.job_reason in ("JobStatusCheckTimeoutExceeded", "JobDeploymentStatusTransitionGracePeriodExceeded")
        ),
    ),
    Row(
        "job_failed",
        "Failed without a verdict, and silent for 30 s",
        "resubmit",
        "the driver was killed before it could say anything",
        lambda seen, _: seen.job == "failed" and seen.silent,
    ),
    Row(
        "false_success",
        "Complete without a complete verdict, and silent for 30 s",
        "resubmit",
        "a submitter that lost its head ends like one that is done; the run folder knows better",
        lambda seen, _: seen.job == "complete" and seen.silent,
    ),
    Row(
        "ending",
        "the job is over by its status, the heartbeat changes",
        "wait",
        "a verdict may be on its way; or the driver lives, and what lives is left alone",
        lambda seen, _: seen.job in ("complete", "failed"),
    ),
    # The job runs, by its status.
    Row(
        "capacity",
        "pods fit nowhere",
        "wait",
        "nodes may come; cluster.budget.capacity_wait_seconds is the limit",
        lambda seen, _: seen.unschedulable_seconds is not None and not seen.begun,
        tell=True,
    ),
    Row(
        "head_lost",
        "the head pod or its node is gone or out of reach, and silent for 30 s",
        "resubmit",
        "KubeRay would wait 300 s and then give up for good",
        lambda seen, _: seen.head_is_gone and seen.silent and seen.job == "running",
    ),
    Row(
        "partition",
        "the head pod or its node is gone or out of reach, the heartbeat changes",
        "wait",
        "the driver lives: it is the view from here that is broken",
        lambda seen, _: seen.head_is_gone and seen.begun and not seen.silent,
    ),
    Row(
        "not_starting",
        "every pod has a node, and for 1800 s no driver has begun",
        "resubmit",
        "an image that cannot be pulled, a volume that cannot be mounted, or a head that hangs",
        lambda seen, _: not seen.begun and seen.silent_seconds >= START_SECONDS,
    ),
    Row("starting", "no driver yet", "wait", "pods are coming up", lambda seen, _: not seen.begun),
    Row(
        "hung",
        "the head runs, no heartbeat changes for 900 s, the run folder is well",
        "resubmit",
        "the supervisor in the head should have acted long before",
        lambda seen, _: seen.silent_seconds >= HUNG_SECONDS,
    ),
    Row(
        "restarting",
        "a verdict that is not final; job and head live",
        "wait",
        "the supervisor in the head starts the next driver, or ends the job",
        lambda seen, _: seen.exit_code is not None,
    ),
    Row(
        "stalled",
        "the head runs, no heartbeat changes for 120 s",
        "wait",
        "the supervisor restarts a driver that hangs; storage may be away for the head alone",
        lambda seen, _: seen.silent_seconds >= 4 * SILENT_SECONDS,
        tell=True,
    ),
    Row("well", "the heartbeat changes", "wait", "the run goes on", lambda *_: True),
)
"""The rule, in the order in which rows are tried."""

GATES: tuple[Row, ...] = (
    Row(
        "resubmissions_spent",
        "cluster.budget.resubmissions is spent",
        "end",
        "the budget of the recipe",
        lambda seen, limits: seen.resubmissions >= limits.resubmissions,
        outcome="budget",
        tell=True,
        clear=True,
    ),
    Row(
        "futile",
        f"{FUTILE_SUBMISSIONS} submissions since the last step ended by themselves",
        "end",
        "trying again would not help",
        lambda seen, _: seen.steps_ahead == 0 and seen.blamed + 1 >= FUTILE_SUBMISSIONS,
        outcome="failed",
        tell=True,
        clear=True,
    ),
    Row(
        "back_off",
        "the submission before this one brought no step either: 30 s of silence, doubling to 900 s",
        "wait",
        "a run that dies at once is not thrown at the cluster again at once",
        lambda seen, _: seen.silent_seconds < back_off_seconds(seen),
    ),
)
"""What stands before a resubmission; a lost head is nobody's fault and does not count as futile."""

BLAMELESS = frozenset({"head_lost", "lost_sight", "interrupted", "pre_running_deadline", "person", "first"})
"""Reasons of submissions that say nothing about the run itself."""


def decide(seen: Observation, limits: Limits) -> Decision:
    """The first row of `TABLE` that holds, and before a resubmission the first of `GATES`."""
    row = next(row for row in TABLE if row.when(seen, limits))
    if row.action != "resubmit":
        return _decision(row, seen)
    gates = [gate for gate in GATES if not (gate.name == "futile" and row.name in BLAMELESS)]
    gate = next((gate for gate in gates if gate.when(seen, limits)), None)
    if gate is None:
        return _decision(row, seen, tell=True)
    return _decision(gate, seen, after=row)


def back_off_seconds(seen: Observation) -> float:
    """Silence that is waited for before the next submission; 0 after one that brought a step."""
    if seen.steps_ahead > 0 or seen.fruitless == 0:
        return 0.0
    return float(min(_BACKOFF_SECONDS * 2 ** (seen.fruitless - 1), _LONGEST_BACKOFF_SECONDS))


def _decision(row: Row, seen: Observation, *, tell: bool = False, after: Row | None = None) -> Decision:
    cause = row if after is None else after
    parts = [cause.sees if after is None else f"{row.sees} (wanted: {cause.name}: {cause.sees})", row.why]
    if cause.action == "resubmit" and seen.exit_code is not None:
        parts.append(f"exit code {seen.exit_code}")
    if cause.action == "resubmit" and seen.job_reason:
        parts.append(f"KubeRay says {seen.job_reason}")
    if row.action == "resubmit" and seen.queued:
        parts.append("submitting again gives up the quota that Kueue had admitted: the new job queues for it")
    return Decision(row.action, row.name, "; ".join(parts), row.outcome, tell or row.tell, row.clear)


def table_rows() -> list[tuple[str, str, str, str]]:
    """(name, what is seen, what is done, why) of every row, for the documentation."""
    return [(row.name, row.sees, row.deed(), row.why) for row in (*TABLE, *GATES)]
