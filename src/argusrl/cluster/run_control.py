"""One run under control: look, decide, act. Everything it does may be done by two controllers, or half and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from argusrl.cluster.decide import Decision, decide
from argusrl.cluster.job_ends import JobEnds, ends_in
from argusrl.cluster.kinds import RAY_CLUSTER, RAY_JOB, Kind
from argusrl.cluster.kube_api import Conflict, KubeApi, KubeError, NotFound, Object, annotations_of, name_of
from argusrl.cluster.memory import Memory, marks_in
from argusrl.cluster.names import JOB_ANNOTATION, submission_name
from argusrl.cluster.notices import Notice, Notices, Notifier
from argusrl.cluster.observation import Limits
from argusrl.cluster.run_record import RunRecord, RunView
from argusrl.cluster.sighting import (
    Sighting,
    by_controller,
    is_leaving,
    is_live,
    job_of,
    seconds_of,
    submission_of,
    uid_of,
)
from argusrl.cluster.targets import Target, cluster_job, gpus_in, next_manifest, recorded_manifest
from argusrl.errors import ArgusError, CorruptionError, StorageError
from argusrl.journal.epochs import fence
from argusrl.journal.submissions import (
    JOB_KIND,
    RAY_JOB_KIND,
    Made,
    Submission,
    SubmissionEnd,
    newest_submission,
    read_end,
    record_end,
    record_made,
    record_submission,
)
from argusrl.storage.files import exists

_FRESH_SECONDS = 15.0  # what was seen longer ago is no ground for an intent
_YOUNG_SECONDS = 3600.0  # a job that ended longer ago, unseen by any controller, is history
_AGAIN_SECONDS = 300.0  # trouble that comes and goes is told that often at most
_KINDS = {"end": "end", "resubmit": "fault", "budget": "budget"}  # of notices, by action or outcome


@dataclass(slots=True)
class RunControl:
    """`reconcile` once every few seconds. `clock` is monotonic, `wall` goes into records only."""

    record: RunRecord
    target: Target
    kube: KubeApi
    notices: Notices
    notifiers: list[Notifier] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    memory: Memory | None = None
    last: Decision | None = None
    view: RunView | None = None
    sight: Sighting = field(default_factory=Sighting)
    job_ends: JobEnds = field(default_factory=JobEnds)
    _seconds: dict[str, float] = field(default_factory=dict)  # what the open intent has taken so far
    _standing: str = ""  # row, submission and attempt that hold now
    _standing_since: float = 0.0
    _stood: set[str] = field(default_factory=set)  # of before

    @property
    def name(self) -> str:
        return self.record.run.name

    def reconcile(self, listed: Sequence[Object] = ()) -> Decision:
        """Look at the run and do the next thing. `listed`: RayJobs of this run, as far as the caller knows."""
        began = self.clock()
        view = self.record.look()
        stranger = None
        if view.folder == "well":
            if self.memory is None:
                events = self.notices.events()
                self.memory, self.job_ends = Memory(marks_in(events)), JobEnds(ends_in(events))
            try:
                stranger = self._others(view, listed)
                view = self._sight(view)
            except StorageError as error:  # it went away meanwhile, or a record is damaged
                damaged = isinstance(error, CorruptionError)
                view = RunView(folder="damaged" if damaged else "away", problem=error.message)
        seen, mark = (self.memory or Memory()).observe(
            view, self.sight, stranger=stranger is not None, now=self.clock()
        )
        decision = decide(seen, self.limits)
        self.view = view
        if mark is not None:
            self.notices.write(
                "driving",
                submission=view.number,
                cluster=self.sight.cluster,
                pod=self.sight.head_pod,
                uid=mark.uid,
                restarts=mark.restarts,
            )
        self._note(decision, view)
        try:
            self._act(decision, view, stranger, began, seen.silent_seconds)
        except ArgusError as error:  # the next look begins where this one stopped
            self.notices.write_once("trouble", error.message)
        return decision

    def _sight(self, view: RunView) -> RunView:
        """Look at the cluster; an intent whose object is there has been carried out."""
        if view.submission is None:
            self.sight = Sighting()
            return view
        asked_at = self.clock()
        self.sight = self.target.look(view.submission, view.made.uid if view.made is not None else "")
        self._see_end(view, view.submission, asked_at)
        if view.made is None and view.end is None and self.sight.uid and self.sight.job != "deleting":
            self._made(view.submission, self.sight.uid)
            return self.record.look()
        return view

    def _see_end(self, view: RunView, submission: Submission, asked_at: float) -> None:
        """A job that is over is written down: it stands so, too, after KubeRay deleted it."""
        sight, ends = self.sight, self.job_ends
        if ends.see(submission, sight, asked_at, self.clock()):
            self.notices.write(
                "job_over",
                submission=view.number,
                job=sight.job,
                reason=sight.job_reason,
                stopped=sight.job_stopped,
            )
        if sight.job != "absent" or view.made is None or view.end is not None:
            return
        if view.number not in ends.by_submission:  # another controller may have seen it
            ends.by_submission = ends_in(self.notices.events()) | ends.by_submission
        self.sight = ends.as_it_was(submission) or sight

    def _others(self, view: RunView, listed: Sequence[Object]) -> Object | None:
        """A live object that a person made. Those of earlier submissions, and strays of late requests, are removed."""
        made = view.made
        known = self.record.made_ids()
        for old in listed:
            namespace = str(old["metadata"].get("namespace") or "")
            if view.submission is not None and namespace != view.submission.namespace:
                text = f"{name_of(old)} in namespace {namespace} names this run's folder: ignored"
                self.notices.write_once("trouble", text)
                continue
            if JOB_ANNOTATION in annotations_of(old):
                found = self._fresh(old, RAY_CLUSTER)
                if found is not None and (view.submission is None or view.submission.manifest != cluster_job(found)):
                    return found
                continue
            uid = uid_of(old)
            if not self._matters(old, view) or (made is not None and uid == made.uid):
                continue
            if view.submission is not None and made is None and name_of(old) == view.submission.name:
                continue  # the open intent's own
            if uid in known and (made is None or view.open_intent):
                continue  # what the open intent replaces: fenced first
            found = self._fresh(old)
            if found is None or not self._matters(found, view):
                continue
            if uid in known or by_controller(found):
                self._remove_stray(found)
            else:
                return found
        return None

    def _fresh(self, old: Object, kind: Kind = RAY_JOB) -> Object | None:
        """The object as it is now; None where it has gone, or cannot be seen. Lists may be late."""
        try:
            found = self.kube.get(kind, name_of(old), old["metadata"].get("namespace"))
        except KubeError:
            return None
        return found if uid_of(found) == uid_of(old) else None

    def _matters(self, found: Object, view: RunView) -> bool:
        """Whether it is under way; or a person's newest one that ended a short while ago, before anybody saw it."""
        if is_live(found):
            return True
        if is_leaving(found) or by_controller(found) or (view.newest and submission_of(found) <= view.newest):
            return False
        ended = seconds_of((found.get("status") or {}).get("endTime"))
        return ended is None or self.wall() - ended < _YOUNG_SECONDS

    def _remove_stray(self, found: Object) -> None:
        metadata = found["metadata"]
        try:
            self.kube.delete(
                RAY_JOB,
                name_of(found),
                metadata.get("namespace"),
                uid=uid_of(found),
                resource_version=metadata.get("resourceVersion"),
            )
        except (Conflict, NotFound):
            return
        except KubeError as error:
            self.notices.write_once("trouble", error.message)
            return
        self.notices.write("removed", name=name_of(found), uid=uid_of(found), reason="a later submission has the run")

    def _note(self, decision: Decision, view: RunView) -> None:
        if self.last is None or (self.last.row, self.last.action) != (decision.row, decision.action):
            self.notices.write(
                "decision",
                submission=view.number,
                row=decision.row,
                action=decision.action,
                reason=decision.reason,
                **({"problem": view.problem} if view.problem else {}),
                **({"unschedulable": self.sight.unschedulable} if self.sight.unschedulable else {}),
            )
        self.last = decision
        standing = f"{decision.row}:{view.number}:{view.attempt}"
        if standing != self._standing:
            self._stood.add(self._standing)
            self._standing, self._standing_since = standing, self.wall()
        if decision.tell and decision.action != "resubmit":
            kind = _KINDS.get(decision.outcome) or _KINDS.get(decision.action, "stall")
            self.tell(kind, self._key(), decision.reason, view)

    def _key(self) -> str:
        """For notices: another one for trouble that comes back after it was over, every five minutes at most."""
        again = f":{int(self._standing_since // _AGAIN_SECONDS)}" if self._standing in self._stood else ""
        return f"{self._standing}{again}"

    def tell(self, kind: str, key: str, text: str, view: RunView | None = None) -> bool:
        """Notify of this key, unless a controller has."""
        view = view or self.view or RunView()
        details = [view.problem, self.sight.unschedulable, self.sight.job_message]
        values = {"submission": view.number, "attempt": view.attempt, "step": view.steps}
        whole = "; ".join([text, *filter(None, details)])
        return self.notices.tell_once(
            self.notifiers, Notice(run=self.name, kind=kind, text=whole, key=key, values=values)
        )

    def _act(self, decision: Decision, view: RunView, stranger: Object | None, began: float, silent: float) -> None:
        submission = view.submission
        if decision.action == "adopt" and stranger is not None:
            self._adopt(view, stranger)
        elif submission is None:
            return
        elif decision.action == "carry_out":
            self._carry_out(submission)
        elif decision.action == "clear":
            self.target.remove(submission, view.made.uid if view.made is not None else self.sight.uid)
        elif decision.action == "end":
            self._end(decision, view)
        elif decision.action == "resubmit" and self.clock() - began <= _FRESH_SECONDS:
            self._resubmit(decision, view, silent)

    def _adopt(self, view: RunView, found: Object) -> None:
        """Put what a person submitted on record, as the newest submission."""
        first = view.newest == 0
        is_job = JOB_ANNOTATION in annotations_of(found)
        manifest = cluster_job(found) if is_job else recorded_manifest(found)
        before = view.submission
        if not is_job and job_of(found) == "starting":  # no driver of it can have begun
            after_attempt = view.attempt
        elif view.end is not None:
            after_attempt = view.end.attempt
        else:
            after_attempt = before.after_attempt if before is not None else 0
        wanted = Submission(
            number=max(view.newest + 1, manifest["number"] if is_job else submission_of(found)),
            name=submission_name(self.name, manifest["number"]) if is_job else name_of(found),
            namespace=str(found["metadata"].get("namespace") or ""),
            kind=JOB_KIND if is_job else RAY_JOB_KIND,
            reason="first" if first else "person",
            text="submitted by a person",
            time=self.wall(),
            manifest=manifest,
            after_attempt=after_attempt,
            after_epoch=view.epoch,
            steps=view.steps,
            finished=view.finished,
            gpus=gpus_in(manifest),
        )
        standing = record_submission(self.record.run, wanted)
        if standing.name == wanted.name and standing.reason == wanted.reason:
            self._made(standing, standing.name if is_job else uid_of(found))

    def _resubmit(self, decision: Decision, view: RunView, silent: float) -> None:
        """Record the intent, then carry it out."""
        before = view.submission
        assert before is not None
        start, number = self.clock(), view.newest + 1
        wanted = Submission(
            number=number,
            name=submission_name(self.name, number),
            namespace=before.namespace,
            kind=before.kind,
            reason=decision.row,
            text=decision.reason,
            time=self.wall(),
            manifest=next_manifest(before.manifest, self.name, number),
            before=before.number,
            replaces=view.made.uid if view.made is not None else "",
            after_attempt=view.attempt,
            after_epoch=view.epoch,
            steps=view.steps,
            gpus=before.gpus,
        )
        standing = record_submission(self.record.run, wanted)
        self._seconds = {"silence": silent, "record": self.clock() - start}
        self.tell("fault", f"{decision.row}:{number}", f"{decision.reason}; submitting again as {wanted.name}", view)
        if read_end(self.record.run, before.number) is None:
            self._carry_out(standing)

    def _carry_out(self, submission: Submission) -> None:
        """Fence, remove what it replaces, create. Each part is done once, whoever does it and however often."""
        run, start = self.record.run, self.clock()
        fence(run, submission.after_epoch, {"fence_before_submission": submission.number})
        fenced = self.clock()
        before = self.record.submission(submission.before)
        if submission.replaces and not self.target.remove(before, submission.replaces):
            return
        removed = self.clock()
        view = self.record.look()
        if view.folder != "well" or view.end is not None or view.made is not None or view.number != submission.number:
            return  # while this one was busy, another controller was faster, or the run came to its end
        uid = self.target.create(submission)
        if not uid:
            return
        self._seconds |= {"fence": fenced - start, "remove": removed - fenced, "create": self.clock() - removed}
        self._made(submission, uid)

    def _made(self, submission: Submission, uid: str) -> None:
        made = Made(number=submission.number, uid=uid, time=self.wall())
        if record_made(self.record.run, made) != made:
            return
        seconds: dict[str, Any] = {name: round(value, 3) for name, value in self._seconds.items()}
        if seconds:
            seconds["total"] = round(sum(self._seconds.values()), 3)
        self.notices.write(
            "submitted", submission=submission.number, name=submission.name, reason=submission.reason, seconds=seconds
        )
        self._seconds = {}

    def _end(self, decision: Decision, view: RunView) -> None:
        run = self.record.run
        if newest_submission(run) > view.newest or exists(run.submission(view.newest + 1)):
            return  # another controller goes on with the run, and it was this that removed the object
        end = SubmissionEnd(
            number=view.number,
            reason=decision.row,
            outcome=decision.outcome,
            text=decision.reason,
            time=self.wall(),
            clear=decision.clear,
            attempt=view.attempt,
        )
        record_end(run, end)
