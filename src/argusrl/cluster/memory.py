"""How long things have been as they are, by one controller's own clock. Lost with it, and then counted anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from argusrl.cluster.observation import Observation
from argusrl.cluster.run_record import RunView
from argusrl.cluster.sighting import HeadMark, Sighting

BLIND_SECONDS = 30.0  # between two looks: longer is not a look every few seconds


@dataclass(slots=True)
class _Since:
    """Since when a condition holds."""

    since: float | None = None

    def seconds(self, holds: bool, now: float) -> float:
        """0 where it does not hold, else since it was first seen to hold."""
        if not holds:
            self.since = None
            return 0.0
        if self.since is None:
            self.since = now
        return now - self.since


@dataclass(slots=True)
class Memory:
    """Of one run. `marks`: by RayCluster and submission, the start of the head pod beside which the driver lived."""

    marks: dict[str, HeadMark] = field(default_factory=dict)
    _life: tuple[Any, ...] | None = None
    _stage: tuple[Any, ...] = ()
    _life_at: float = 0.0
    _looked_at: float = float("inf")
    _beats: int = 0
    _last_head: HeadMark | None = None
    _ended: _Since = field(default_factory=_Since)
    _unschedulable: _Since = field(default_factory=_Since)

    def observe(
        self, view: RunView, sight: Sighting, *, stranger: bool, now: float
    ) -> tuple[Observation, HeadMark | None]:
        """What the rule looks at; and the mark of a head beside which the driver was seen alive for the first time."""
        begun = view.started and sight.job != "starting"
        beaten = view.folder == "well" and self._listen(view, sight, begun, now)
        place = f"{sight.cluster} {view.number}"
        new_mark = self._mark(sight, place, beaten)
        mark = self.marks.get(place)
        replaced = mark is not None and sight.head in ("running", "pending") and sight.head_mark != mark
        # It goes on over several submissions, until a driver begins.
        waiting = bool(sight.unschedulable) or self._unschedulable.since is not None
        waited = self._unschedulable.seconds(waiting and sight.admitted and not begun, now)
        seen = Observation(
            folder=view.folder,
            submission=view.number,
            ended=view.end is not None,
            ended_seconds=self._ended.seconds(view.end is not None, now),
            clear=view.end is not None and view.end.clear,
            # A job whose RayCluster is gone, or was taken off the run, is not wanted any more.
            open_intent=view.open_intent and not (view.is_job and sight.job == "absent"),
            exit_code=view.verdict.exit_code if view.verdict is not None else None,
            # A job that finds its run complete begins no attempt. One that has more to do, by a longer recipe, does.
            complete=view.complete or (view.finished and sight.job == "complete"),
            started=view.started,
            silent_seconds=now - self._life_at,
            steps_ahead=view.steps_ahead,
            fruitless=view.fruitless,
            blamed=view.blamed,
            resubmissions=view.resubmissions,
            gpu_hours=view.gpu_hours,
            head="replaced" if replaced else sight.head,
            node=sight.node,
            stranger=stranger,
            job=sight.job,
            job_reason=sight.job_reason,
            job_stopped=sight.job_stopped,
            queued=sight.queued,
            admitted=sight.admitted,
            unschedulable_seconds=waited if sight.unschedulable else None,
        )
        return seen, new_mark

    def _listen(self, view: RunView, sight: Sighting, begun: bool, now: float) -> bool:
        """Whether a heartbeat changed, or another sign of life, since the last look that saw the run folder.

        Time in which this controller saw nothing is not silence of the driver: both may have waited for storage.
        """
        if now - self._looked_at > BLIND_SECONDS:
            self._life_at += now - self._looked_at
        self._looked_at = now
        # Besides signs of life: where waiting for something else begins or ends, silence is counted anew.
        if sight.job != "unknown":
            crowded = bool(sight.unschedulable) and not begun
            self._stage = (sight.cluster, sight.admitted, sight.job == "starting", crowded)
        life = (view.sign_of_life, *self._stage)
        before, self._life = self._life, life
        if life == before:
            return False
        self._life_at = now
        return before is not None and life[1:] == before[1:]

    def _mark(self, sight: Sighting, place: str, beaten: bool) -> HeadMark | None:
        """A head that was there at two beats in a row is the driver's: one of them may be an older pod's last."""
        same = sight.head == "running" and sight.head_mark is not None and sight.head_mark == self._last_head
        self._last_head = sight.head_mark
        if not same:
            self._beats = 0
            return None
        self._beats += beaten
        mark = sight.head_mark
        if self._beats < 2 or mark is None or self.marks.get(place) == mark:
            return None
        self.marks[place] = mark
        return mark


def marks_in(events: Sequence[dict[str, Any]]) -> dict[str, HeadMark]:
    """The marks that controllers wrote down, the newest of each RayCluster and submission."""
    return {
        f"{event['cluster']} {event['submission']}": HeadMark(uid=event["uid"], restarts=event["restarts"])
        for event in events
        if event.get("kind") == "driving"
    }
