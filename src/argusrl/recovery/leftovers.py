"""What interrupted epochs had in the journal of a committed step, and what became of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from argusrl.errors import CorruptionError
from argusrl.journal.commits import Commit, CommitChain
from argusrl.journal.episodes import parse_segment_name, read_finished, read_records
from argusrl.journal.records import Finished, Record
from argusrl.journal.running import RunningEpisodes
from argusrl.storage.layout import RunFolder
from argusrl.types import Trajectory, TrajectoryKey

_Print = tuple[float, tuple[tuple[int, ...], ...]]  # seconds and tokens: another try of an episode has other seconds


@dataclass(frozen=True, slots=True)
class Leavings:
    """Of one step."""

    step: int
    kept: int = 0  # finished trajectories of lower epochs that the commit has
    lost: int = 0  # finished trajectories that it lacks, or has from another try
    shares: dict[int, float] = field(default_factory=dict)  # by epoch: tokens that count / tokens in its journal


def read_leavings(folder: RunFolder, chain: CommitChain, step: int) -> Leavings:
    """Compare the segments of epochs before the commit's with the commit. Damaged records are left out."""
    commit, before = chain.read(step), chain.read(step - 1)
    segments = _lower_segments(folder.trajectories(step), commit.epoch)
    if not segments:
        return Leavings(step)
    committed = _committed(folder, commit)
    finished: dict[TrajectoryKey, set[_Print]] = defaultdict(set)
    shares = {}
    for epoch, paths in segments.items():
        sampled = counted = 0
        running = RunningEpisodes(before.adapter.sha256)
        for record in (record for path in paths for record in _readable(path)):
            if not isinstance(record, Finished):
                running.follow(record)
                continue
            trajectory = record.trajectory
            ours = all(turn.adapter_sha256 == before.adapter.sha256 for turn in trajectory.turns)
            running.finished(trajectory.key, counts=ours)
            if ours:
                finished[trajectory.key].add(_print(trajectory))
                tokens = sum(len(turn.response_ids) for turn in trajectory.turns)
                sampled += tokens
                counted += tokens if committed.get(trajectory.key) == _print(trajectory) else 0
        for key, episode in running.unfinished().items():
            own = [turn.response_ids for turn in episode.turns] + [episode.ids]
            tokens = sum(len(ids) for ids in own)
            sampled += tokens
            counted += tokens if key in committed and _begins(committed[key][1], own) else 0
        shares[epoch] = counted / sampled if sampled else 0.0
    kept = sum(committed.get(key) in prints for key, prints in finished.items())
    return Leavings(step, kept, len(finished) - kept, shares)


def _committed(folder: RunFolder, commit: Commit) -> dict[TrajectoryKey, _Print]:
    found = {}
    for one in commit.trajectories:
        try:
            record = read_finished(folder, commit.segments[one.segment].path, one.offset, one.length)
        except CorruptionError:  # retired, or damaged: the checker tells
            continue
        found[one.key] = _print(record.trajectory)
    return found


def _print(trajectory: Trajectory) -> _Print:
    return trajectory.seconds, tuple(turn.response_ids for turn in trajectory.turns)


def _begins(whole: tuple[tuple[int, ...], ...], start: list[tuple[int, ...]]) -> bool:
    start = [ids for ids in start if ids]
    return len(start) <= len(whole) and all(ids == whole[place][: len(ids)] for place, ids in enumerate(start))


def _readable(path: Path) -> Iterator[Record]:
    """Its records up to the first damage."""
    try:
        yield from read_records(path, require_sealed=False)
    except CorruptionError:
        return


def _lower_segments(folder: Path, epoch: int) -> dict[int, list[Path]]:
    segments: dict[int, list[Path]] = defaultdict(list)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        parsed = parse_segment_name(path.name)
        if parsed and parsed[1] < epoch:
            segments[parsed[1]].append(path)
    return dict(sorted(segments.items()))
