"""The recovery report of a run: which faults, how fast found and healed, what was lost, where the time went.

Reads only a run folder, so it can be made anywhere and at any time. Its words:

- detect: from a shot of a rehearsal to the fault's event (of a driver: to the verdict of its attempt).
- recover: from the shot (without one, from the fault's event) to the first commit after the fault was found. Medians
  leave out faults that another one met before that commit.
- cold start: from the start of the first driver process to commit 1, where nothing broke before it.
- tokens salvaged: of the tokens that a shot engine had sampled for replies it had not ended, the share that other
  engines went on from.
- unique goodput: see goodput.py.
- durability tax: seconds that a step waits for its journal, its commit and the staging of its checkpoint.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from argusrl.journal.attempts import Verdict, newest_attempt, read_verdict
from argusrl.journal.commits import Commit, CommitChain
from argusrl.journal.epochs import numbered
from argusrl.observe.events import event_seconds, read_events
from argusrl.recovery.goodput import Goodput, measure
from argusrl.recovery.leftovers import Leavings, read_leavings
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import read_lines

_TAX = ("rollout/seal_seconds", "time/commit_seconds", "time/checkpoint_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRecord:
    """One fault; times are seconds since 1970."""

    kind: str  # engine | rank | episode_worker | driver | …
    member: str
    how: str
    shot_at: float | None = None  # in a rehearsal: when
    point: str = ""  # and where
    found_at: float | None = None  # None: it broke together with, or during the recovery from, another one
    decision: str = ""
    healed_at: float | None = None  # first commit afterwards
    disturbed: bool = False  # another fault came before that commit: the medians leave this one out

    @property
    def detect_seconds(self) -> float | None:
        return None if self.shot_at is None or self.found_at is None else max(0.0, self.found_at - self.shot_at)

    @property
    def recover_seconds(self) -> float | None:
        if self.found_at is None or self.healed_at is None:
            return None
        return self.healed_at - (self.found_at if self.shot_at is None else self.shot_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What one run folder tells."""

    faults: tuple[FaultRecord, ...]
    cold_start_seconds: float | None
    trajectories_lost: int  # finished in an interrupted attempt, yet not what the commit has
    steps_lost: int  # committed once, gone now
    trajectories_kept: int  # finished ones that a later epoch took over
    running_tokens: int  # of replies that shot engines had not ended
    continued_tokens: int  # of them, gone on from
    goodput: Goodput
    tax_seconds: float | None  # per step
    step_seconds: float | None  # median of the committed steps


def recovery_report(folder: RunFolder) -> RecoveryReport:
    """Read a run folder, finished or not. Raises CorruptionError where its commits are damaged."""
    chain = CommitChain(folder)
    head = chain.head()
    commits = [chain.read(step) for step in range((head.step if head else -1) + 1)]
    events = read_events(folder.events)
    verdicts = {
        number: verdict
        for number in range(1, newest_attempt(folder) + 1)
        if (verdict := read_verdict(folder, number)) is not None
    }
    faults = find_faults(events, verdicts, commits)
    leavings = [read_leavings(folder, chain, step) for step in range(1, len(commits))]
    return RecoveryReport(
        faults=tuple(faults),
        cold_start_seconds=_cold_start(events, faults, commits),
        trajectories_lost=sum(one.lost for one in leavings),
        trajectories_kept=sum(one.kept for one in leavings),
        steps_lost=_steps_lost(folder, commits, verdicts.values()),
        **_tokens(folder, events),
        goodput=measure(folder, events, verdicts, commits, faults_of(faults), shares_of(leavings, events, commits)),
        tax_seconds=_tax(folder),
        step_seconds=_median(commit.metrics.get("time/step_seconds") for commit in commits[1:]),
    )


def find_faults(
    events: Sequence[dict[str, Any]], verdicts: dict[int, Verdict], commits: Sequence[Commit]
) -> list[FaultRecord]:
    """Shots and what was found of them, then faults that nobody shot, in order of time."""
    told = [event for event in events if event.get("kind") == "fault"]
    records = []
    ended: set[int] = set()
    for shot in (event for event in events if event.get("kind") == "shot"):
        common = {"kind": shot["victim"], "member": shot["member"], "how": shot["how"], "point": shot["point"]}
        if shot["victim"] == "driver":
            verdict = verdicts.get(shot["attempt"])
            ended.add(shot["attempt"])
            found_at = None if verdict is None or verdict.complete else verdict.time
            records.append(_record(commits, shot, found_at, "restart_driver", **common))
        else:
            fault = _matching(told, shot)
            if fault is not None:
                told.remove(fault)
            found_at = None if fault is None else event_seconds(fault)
            records.append(_record(commits, shot, found_at, "" if fault is None else fault["decision"], **common))
    for fault in told:
        common = {"kind": fault["fault"], "member": fault["member"], "how": fault["how"]}
        records.append(_record(commits, None, event_seconds(fault), fault["decision"], **common))
    for attempt, verdict in verdicts.items():
        if attempt not in ended and verdict.outcome == "killed":
            common = {"kind": "driver", "member": "driver", "how": verdict.reason}
            records.append(_record(commits, None, verdict.time, "restart_driver", **common))
    records.sort(key=_begin)
    return [replace(record, disturbed=_is_disturbed(record, records)) for record in records]


def _begin(record: FaultRecord) -> float:
    return record.shot_at or record.found_at or 0.0


def _is_disturbed(record: FaultRecord, records: Sequence[FaultRecord]) -> bool:
    """Whether another fault's beginning or healing overlaps with this one's."""
    end = record.healed_at or _begin(record)
    return any(
        other is not record and _begin(other) < end and (other.healed_at or _begin(other)) > _begin(record)
        for other in records
    )


def _matching(faults: Sequence[dict[str, Any]], shot: dict[str, Any]) -> dict[str, Any] | None:
    """The event that tells of a shot: the first one of its victim later on, else of its kind."""
    at = event_seconds(shot)
    later = [event for event in faults if event["fault"] == shot["victim"] and event_seconds(event) >= at]
    own = [event for event in later if event.get("member") == shot["member"]]
    return next(iter(own or later), None)


def _record(
    commits: Sequence[Commit], shot: dict[str, Any] | None, found_at: float | None, decision: str, **common: Any
) -> FaultRecord:
    healed_at = None
    if found_at is not None:
        healed_at = next((commit.time for commit in commits if commit.time >= found_at), None)
    shot_at = None if shot is None else event_seconds(shot)
    return FaultRecord(shot_at=shot_at, found_at=found_at, decision=decision, healed_at=healed_at, **common)


def faults_of(records: Iterable[FaultRecord]) -> list[tuple[str, str, float, float]]:
    """(kind, member, from when, until when it was found) of faults whose beginning is known."""
    return [
        (record.kind, record.member, record.shot_at or record.found_at, record.found_at)
        for record in records
        if record.found_at is not None
    ]


def shares_of(
    leavings: Iterable[Leavings], events: Sequence[dict[str, Any]], commits: Sequence[Commit]
) -> dict[tuple[int, int], float]:
    """By (step, epoch): how much of what an interrupted epoch had sampled counts in the commit.

    An ordinary run deletes the evidence after the commit; then a step that took something over took everything.
    """
    shares = {
        (event["step"], epoch): 1.0
        for event in events
        if event.get("kind") == "adopted" and event.get("trajectories", 0) + event.get("unfinished_tokens", 0) > 0
        for epoch in range(1, commits[event["step"]].epoch if event["step"] < len(commits) else 1)
    }
    return shares | {(one.step, epoch): share for one in leavings for epoch, share in one.shares.items()}


def _cold_start(
    events: Sequence[dict[str, Any]], faults: Sequence[FaultRecord], commits: Sequence[Commit]
) -> float | None:
    first = next((event for event in events if event.get("kind") == "attempt"), None)
    if first is None or "started" not in first or len(commits) < 2:
        return None
    if any((fault.shot_at or fault.found_at or 0.0) < commits[1].time for fault in faults):
        return None
    return commits[1].time - float(first["started"])


def _steps_lost(folder: RunFolder, commits: Sequence[Commit], verdicts: Iterable[Verdict]) -> int:
    """Steps that something written after their commit names, and that are no longer there."""
    named = [verdict.step or 0 for verdict in verdicts]
    named += [row["step"] for row in read_lines(folder.metrics) if isinstance(row.get("step"), int)]
    named += numbered(folder.evaluations, ".json") + numbered(folder.commits, ".json")
    return max(0, max(named, default=0) - max(0, len(commits) - 1))


def _tokens(folder: RunFolder, events: Sequence[dict[str, Any]]) -> dict[str, int]:
    running = continued = 0
    for shot in events:
        if shot.get("kind") != "shot" or shot["victim"] != "engine":
            continue
        with suppress(OSError, ValueError):
            running += int(folder.running_tokens(shot["shot"]).read_text())
    for event in events:
        if event.get("kind") == "healed":
            continued += int(event.get("continued_tokens", 0))
    return {"running_tokens": running, "continued_tokens": min(running, continued)}


def _tax(folder: RunFolder) -> float | None:
    means = []
    for name in _TAX:
        values = [row[name] for row in read_lines(folder.metrics) if isinstance(row.get(name), int | float)]
        if values:
            means.append(statistics.fmean(values))
    return sum(means) if means else None


def _median(values: Iterable[Any]) -> float | None:
    numbers = [value for value in values if isinstance(value, int | float)]
    return statistics.median(numbers) if numbers else None


def summary(reports: Sequence[RecoveryReport], cold_start_seconds: float | None = None) -> dict[str, Any]:
    """The figures of one run, or of many of the same recipe pooled, as JSON. Where nothing was measured it says null.

    `cold_start_seconds` stands in where no run of `reports` began undisturbed.
    """
    faults = [fault for report in reports for fault in report.faults]
    cold = _median(report.cold_start_seconds for report in reports) or cold_start_seconds
    recover = _by_kind(faults, lambda fault: None if fault.disturbed else fault.recover_seconds)
    tax, step = _median(one.tax_seconds for one in reports), _median(one.step_seconds for one in reports)
    running = sum(report.running_tokens for report in reports)
    whole = Goodput.together([report.goodput for report in reports])
    return {
        "faults": {kind: sum(fault.kind == kind for fault in faults) for kind in sorted({one.kind for one in faults})},
        "trajectories_lost": sum(report.trajectories_lost for report in reports),
        "trajectories_kept": sum(report.trajectories_kept for report in reports),
        "steps_lost": sum(report.steps_lost for report in reports),
        "tokens_salvaged": sum(report.continued_tokens for report in reports) / running if running else None,
        "detect_seconds": _by_kind(faults, lambda fault: fault.detect_seconds),
        "recover_seconds": recover,
        "cold_start_seconds": None if cold is None else round(cold, 3),
        "recover_vs_cold_start": {kind: round(one["median"] / cold, 3) for kind, one in recover.items()}
        if cold
        else {},
        "unique_goodput": None if whole.share is None else round(whole.share, 4),
        "goodput_seconds": {name: round(seconds, 3) for name, seconds in whole.seconds.items()},
        "durability_tax": {
            "seconds_per_step": None if tax is None else round(tax, 4),
            "share_of_step": round(tax / step, 4) if tax is not None and step else None,
        },
    }


def _by_kind(
    faults: Sequence[FaultRecord], measured: Callable[[FaultRecord], float | None]
) -> dict[str, dict[str, float]]:
    figures: dict[str, list[float]] = {}
    for fault in faults:
        value = measured(fault)
        if value is not None:
            hung = fault.how in ("stop", "hung")  # found by a deadline, which is another thing than a death
            figures.setdefault(f"{fault.kind}_hung" if hung else fault.kind, []).append(value)
    return {
        kind: {"median": round(statistics.median(values), 3), "worst": round(max(values), 3), "count": len(values)}
        for kind, values in sorted(figures.items())
    }
