"""Jobs that were over when they went. KubeRay may delete a RayJob itself, ttlSecondsAfterFinished after its end.

It does so where its operator runs with DELETE_RAYJOB_CR_AFTER_JOB_FINISHES. Nobody stopped the run then: the job
stands as it did when it was seen last. One that went sooner or later than KubeRay's rule was deleted by a person.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from argusrl.cluster.sighting import Sighting
from argusrl.journal.submissions import Submission

_LATE_SECONDS = 15.0  # KubeRay counts from the end that Ray tells, and comes round now and then
_OVER = ("complete", "failed")


@dataclass(slots=True)
class JobEnds:
    """Of one run. `by_submission` is what controllers wrote down: how each job ended."""

    by_submission: dict[int, Sighting] = field(default_factory=dict)
    _number: int = 0
    _live_at: float = float("-inf")  # not over yet
    _over_since: float | None = None
    _over_at: float = float("-inf")  # still there
    _gone_at: float | None = None

    def see(self, submission: Submission, sight: Sighting, asked_at: float, now: float) -> bool:
        """Take a look that was asked for and answered then; whether it shows an end that is worth writing down."""
        if submission.number != self._number:
            self._number, self._live_at = submission.number, float("-inf")
            self._over_since = self._gone_at = None
        if sight.job not in ("absent", "deleting", "unknown"):
            self._gone_at = None  # it was not there yet when it was looked for
        if sight.job in _OVER:
            if self._over_since is None:
                self._over_since = now
            self._over_at = asked_at
            before = self.by_submission.get(submission.number)
            self.by_submission[submission.number] = replace(
                sight, pods=(), head="none", head_pod="", head_mark=None, head_node="", node="well", unschedulable=""
            )
            return before is None or (before.job, before.job_reason) != (sight.job, sight.job_reason)
        if sight.job in ("absent", "deleting"):
            self._gone_at = now if self._gone_at is None else self._gone_at
        elif sight.job != "unknown" and self._over_since is None:  # a job that was over is not live again: an old list
            self._live_at = asked_at
        return False

    def as_it_was(self, submission: Submission) -> Sighting | None:
        """How the job of `submission`, which is gone, stood before KubeRay deleted it; None where that was a person."""
        spec = submission.manifest.get("spec") or {}
        end = self.by_submission.get(submission.number)
        if end is None or self._gone_at is None or not spec.get("shutdownAfterJobFinishes"):
            return None
        after = float(spec.get("ttlSecondsAfterFinished") or 0.0)
        too_soon = self._gone_at - self._live_at < after - _LATE_SECONDS
        too_late = self._over_since is not None and self._over_at - self._over_since > after + _LATE_SECONDS
        return None if too_soon or too_late else end


def ends_in(events: Sequence[dict[str, Any]]) -> dict[int, Sighting]:
    """The ends of jobs that controllers wrote down, by submission."""
    return {
        event["submission"]: Sighting(job=event["job"], job_reason=event["reason"], job_stopped=event["stopped"])
        for event in events
        if event.get("kind") == "job_over"
    }
