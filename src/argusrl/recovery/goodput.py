"""Unique goodput: the share of held resource-seconds whose product a commit names, counted once.

All bundles of a run are held together, so a second of the run is one second of all of them and shares of seconds are
shares of resource-seconds. Held is the time from the start of a driver process to its end, and the gaps that faults
leave between two drivers; not the time after a run was interrupted on purpose.

Each held second goes to one of BUCKETS:

- rollout, train, sync: of the try of a step that was committed. The rollout of an interrupted try counts by the share
  of its journalled tokens that the commit has. These three are the goodput.
- start: until the first rollout of a run, or of one that goes on after an interruption.
- detection: from a fault to its discovery, where its beginning is known. While an engine is gone the others' share of
  the rollout goes on being useful.
- recovery: after a fault, until the workers are there again. replay: loading a checkpoint and repeated updates.
- repeated: tries of steps that were interrupted, as far as nothing came of them.
- commit, checkpoint, evaluation, waiting (for storage).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from argusrl.journal.attempts import Verdict, newest_attempt, read_heartbeat
from argusrl.journal.commits import Commit
from argusrl.observe.events import event_seconds
from argusrl.observe.phases import read_phases
from argusrl.storage.layout import RunFolder

USEFUL = ("rollout", "train", "sync")
LOST = ("detection", "recovery", "replay", "repeated", "waiting")  # what faults cost
BUCKETS = (
    *USEFUL,
    *("start", "detection", "recovery", "replay", "repeated", "commit", "checkpoint", "evaluation", "waiting"),
)
_BUCKET_OF = {
    "resume": "replay",
    "commit": "commit",
    "checkpoint": "checkpoint",
    "evaluate": "evaluation",
    "wait": "waiting",
}
_ENDED_ON_PURPOSE = ("complete", "interrupted")


@dataclass(frozen=True, slots=True)
class Goodput:
    """Held seconds by bucket."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))

    @property
    def held_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float | None:
        """None for a run that held nothing."""
        held = self.held_seconds
        return sum(self.seconds[name] for name in USEFUL) / held if held else None

    @classmethod
    def together(cls, parts: Sequence[Goodput]) -> Goodput:
        """Of several runs."""
        return cls({name: sum(part.seconds[name] for part in parts) for name in BUCKETS})


@dataclass(frozen=True, slots=True)
class _Span:
    start: float
    end: float
    phase: str
    shares: dict[str, float]  # by bucket; they add up to 1


def measure(
    folder: RunFolder,
    events: Sequence[dict[str, Any]],
    verdicts: dict[int, Verdict],
    commits: Sequence[Commit],
    faults: Sequence[tuple[str, str, float, float]],
    kept: dict[tuple[int, int], float],
) -> Goodput:
    """Add up the phases of all attempts.

    `faults` are (kind, member, begin, found) in seconds since 1970; `kept` is by (step, epoch): see leftovers.py.
    """
    epochs = {commit.step: commit.epoch for commit in commits}
    spans: list[_Span] = []
    cold, ended_at = True, 0.0
    started = {
        event["attempt"]: float(event["started"])
        for event in events
        if event.get("kind") == "attempt" and "started" in event
    }
    for attempt in range(1, newest_attempt(folder) + 1):
        if attempt not in started:
            continue
        begin, end = started[attempt], _end(folder, attempt, verdicts)
        if not cold:
            spans.append(_Span(ended_at, begin, "", {"recovery": 1.0}))
        spans += _spans(folder, attempt, begin, end, epochs, kept, cold)
        verdict = verdicts.get(attempt)
        cold = verdict is not None and verdict.outcome in _ENDED_ON_PURPOSE
        ended_at = end
    for overlay in _overlays(events, faults):
        spans = [part for span in spans for part in _laid_over(span, *overlay)]
    seconds = dict.fromkeys(BUCKETS, 0.0)
    for span in spans:
        for bucket, share in span.shares.items():
            seconds[bucket] += share * max(0.0, span.end - span.start)
    return Goodput(seconds)


def _end(folder: RunFolder, attempt: int, verdicts: dict[int, Verdict]) -> float:
    if attempt in verdicts:
        return verdicts[attempt].time
    heartbeat = read_heartbeat(folder, attempt)
    return 0.0 if heartbeat is None else heartbeat.time


def _spans(
    folder: RunFolder,
    attempt: int,
    begin: float,
    end: float,
    epochs: dict[int, int],
    kept: dict[tuple[int, int], float],
    cold: bool,
) -> list[_Span]:
    entries = [entry for entry in read_phases(folder.phases(attempt)) if entry["time"] <= end]
    marks = [{"time": begin, "phase": "start", "step": 0, "epoch": 0}, *entries]
    spans = []
    for entry, following in zip(marks, [*entries, {"time": end}], strict=True):
        phase, place = entry["phase"], (entry["step"], entry["epoch"])
        cold = cold and phase != "rollout"
        if cold and phase not in _BUCKET_OF:
            shares = {"start": 1.0}
        elif phase in _BUCKET_OF:
            shares = {_BUCKET_OF[phase]: 1.0}
        elif phase not in USEFUL:
            shares = {"recovery": 1.0}
        elif epochs.get(place[0]) == place[1]:
            shares = {phase: 1.0}
        else:
            share = kept.get(place, 0.0) if phase == "rollout" else 0.0
            shares = {phase: share, "repeated": 1.0 - share}
        spans.append(_Span(entry["time"], following["time"], phase, shares))
    return spans


def _overlays(
    events: Sequence[dict[str, Any]], faults: Sequence[tuple[str, str, float, float]]
) -> list[tuple[float, float, str, float, tuple[str, ...]]]:
    """(from, to, bucket, share of all resources, phases it counts in; () is every phase)."""
    engines = max((event["engines"] for event in events if isinstance(event.get("engines"), int)), default=1)
    overlays: list[tuple[float, float, str, float, tuple[str, ...]]] = []
    for kind, member, begin, found in faults:
        if kind != "engine":
            overlays.append((begin, found, "detection", 1.0, ()))
            continue
        using = ("rollout", "sync")  # training goes on without engines
        overlays.append((begin, found, "detection", 1.0 / engines, using))
        healed = [
            event_seconds(event) for event in events if event.get("kind") == "healed" and event.get("member") == member
        ]
        back = min((at for at in healed if at >= found), default=found)
        overlays.append((found, back, "recovery", 1.0 / engines, using))
    return overlays


def _laid_over(
    span: _Span, start: float, end: float, bucket: str, share: float, phases: tuple[str, ...]
) -> list[_Span]:
    """The span in up to three parts: `share` of the one between `start` and `end` goes to `bucket`."""
    start, end = max(start, span.start), min(end, span.end)
    if start >= end or (phases and span.phase not in phases):
        return [span]
    shares = {name: value * (1.0 - share) for name, value in span.shares.items()}
    shares[bucket] = shares.get(bucket, 0.0) + share
    parts = [
        _Span(span.start, start, span.phase, span.shares),
        _Span(start, end, span.phase, shares),
        _Span(end, span.end, span.phase, span.shares),
    ]
    return [part for part in parts if part.start < part.end]
