"""What a controller sees of a run on a cluster, the limits it keeps to, and the form of its rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Action = Literal["wait", "adopt", "carry_out", "resubmit", "end", "clear"]
Folder = Literal["well", "away", "damaged"]
Head = Literal["running", "pending", "none", "ended", "replaced", "leaving", "unknown"]
Node = Literal["well", "unready", "gone", "leaving", "unknown"]
Job = Literal[
    "absent", "unknown", "starting", "running", "complete", "failed", "invalid", "suspended", "retrying", "deleting"
]

SILENT_SECONDS = 30.0  # six heartbeats: a driver whose head is gone, too, is taken for dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything the rule looks at, of one run, as scalars."""

    # The run folder.
    folder: Folder = "well"
    submission: int = 1  # number on record, 0 if there is none
    ended: bool = False  # an end is on record
    ended_seconds: float = 0.0  # since that was seen
    clear: bool = False  # the end says that what is left in the cluster goes, too
    open_intent: bool = False  # the newest submission is on record, and nobody has seen its object yet
    exit_code: int | None = None  # of the newest attempt of this submission, once it has a verdict
    complete: bool = False  # the newest attempt of the run says so
    started: bool = True  # this submission has an attempt
    silent_seconds: float = 0.0  # since a heartbeat of the run changed, or this submission was first seen
    steps_ahead: int = 0  # committed since the intent of this submission
    fruitless: int = 0  # submissions in a row before this one that brought no step
    blamed: int = 0  # of them, ended by themselves
    resubmissions: int = 0
    gpu_hours: float = 0.0
    # The head pod, and the node it is on.
    head: Head = "running"
    node: Node = "well"
    # The cluster.
    stranger: bool = False  # a live object of this run that no record knows, made by a person
    job: Job = "running"
    job_reason: str = ""  # as KubeRay says it
    job_stopped: bool = False  # Ray says STOPPED
    queued: bool = False  # labelled for Kueue
    admitted: bool = True  # by Kueue, and not suspended
    unschedulable_seconds: float | None = None  # since a pod was found to fit nowhere; None where all fit

    @property
    def head_is_gone(self) -> bool:
        """Whether the pod in which the driver was is not there, or on a node that nobody hears of."""
        return self.head in ("none", "ended", "replaced") or self.node in ("gone", "unready")

    @property
    def silent(self) -> bool:
        return self.silent_seconds >= SILENT_SECONDS

    @property
    def begun(self) -> bool:
        """Whether there should be a driver. A job that Kueue admits again starts again, with attempts of before."""
        return self.started and self.job != "starting"

    @property
    def over(self) -> bool:
        """Whether nothing of this submission runs on by itself."""
        return self.job in ("complete", "failed") or (self.head_is_gone and self.job != "starting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From `cluster.budget` of the recipe."""

    resubmissions: int = 20
    gpu_hours: float | None = None
    capacity_wait_seconds: float = 14_400.0


@dataclass(frozen=True, slots=True)
class Row:
    """If `when`, then `action`: the first row that holds counts."""

    name: str
    sees: str  # the condition, for people
    action: Action
    why: str  # for people
    when: Callable[[Observation, Limits], bool]
    outcome: str = ""  # of an end
    tell: bool = False  # somebody should hear of it
    clear: bool = False  # an end that takes what is left in the cluster with it

    def deed(self) -> str:
        """What is done, for people."""
        words = [self.action.replace("_", " ") + (f": {self.outcome}" if self.outcome else "")]
        words += ["delete the job"] if self.clear else []
        words += ["tell"] if self.tell or self.action == "resubmit" else []
        return ", ".join(words)
