"""The journal as an episode worker sees it: one writer of one step, and what an earlier driver's writers left."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from argusrl.errors import CorruptionError
from argusrl.journal.images import ImageWriter, read_image
from argusrl.journal.records import (
    Failed,
    Finished,
    Partial,
    Record,
    Started,
    TurnDone,
    decode_record,
    encode_record,
)
from argusrl.journal.running import RunningEpisodes
from argusrl.journal.segments import (
    Location,
    SealedSegment,
    SegmentHeader,
    SegmentWriter,
    read_record,
    read_segment,
)
from argusrl.storage.files import list_folder
from argusrl.storage.layout import RunFolder
from argusrl.storage.visibility import await_visible
from argusrl.types import (
    EpisodeEnd,
    EpisodeFailure,
    Image,
    ImageRef,
    Trajectory,
    TrajectoryKey,
    TrajectoryRef,
    Turn,
    Unfinished,
)

_SEGMENT_NAME = re.compile(r"(?P<writer>.+)\.e(?P<epoch>\d{4,})\.seg")


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedStep:
    """What one writer contributed to a step; paths are relative to the run folder."""

    step: int
    segments: tuple[SealedSegment, ...]  # trajectories first, then images if there are any


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What `EpisodeJournal.adopt` brought over."""

    trajectories: tuple[TrajectoryRef, ...]  # in this journal's own segment now
    foreign: int  # finished under another adapter: they do not count
    damaged: tuple[str, ...]  # what could not be read, one line each: for an event
    unfinished: Mapping[TrajectoryKey, Unfinished] = field(default_factory=dict)  # images stay where they were


class EpisodeJournal:
    """Writes `trajectories/<step>/<writer>.e<epoch>.seg` and the images beside it.

    A writer name may be used once per (step, epoch): a worker that is made again takes another one. Nothing is
    durable before `sync` or `seal` returned; callers batch (one sync for many records). Every method raises
    StorageError if storage fails, and the journal is unusable from then on.
    """

    def __init__(self, run: RunFolder, step: int, epoch: int, writer: str) -> None:
        """Raises FileExistsError if that writer wrote for this step and epoch before."""
        self.run, self.step, self.epoch, self.writer = run, step, epoch, writer
        self._path = run.segment(step, writer, epoch)
        header = SegmentHeader(kind="trajectories", step=step, epoch=epoch, writer=writer)
        self._segment = SegmentWriter(self._path, header)
        self._images = ImageWriter(run, step, epoch, writer)

    def started(
        self,
        key: TrajectoryKey,
        *,
        attempt: int,
        seed: int,
        adapter_version: int,
        adapter_sha256: str,
        environment: Mapping[str, Any],
    ) -> None:
        """An attempt is about to begin; `sync` before its first request."""
        self._append(
            Started(
                key=key,
                attempt=attempt,
                seed=seed,
                adapter_version=adapter_version,
                adapter_sha256=adapter_sha256,
                environment=dict(environment),
            )
        )

    def turn(self, key: TrajectoryKey, index: int, turn: Turn, *, attempt: int = 0) -> None:
        """Turn `index` of an unfinished episode is complete."""
        self._append(TurnDone(key=key, attempt=attempt, index=index, turn=turn))

    def partial(self, record: Partial) -> None:
        """Keep a span of a reply that is still being sampled."""
        self._append(record)

    def image(self, image: Image) -> ImageRef:
        """Keep an image (once per content) for the turns that show it."""
        return self._images.add(image)

    def finished(self, trajectory: Trajectory, *, image_patches: int) -> TrajectoryRef:
        """Keep a finished episode. `image_patches` counts its vision patches before merging. Raises DataError, too."""
        location = self._append(Finished(trajectory=trajectory, image_patches=image_patches))
        return trajectory_ref(trajectory, self.run.relative(self._path), location, image_patches)

    def failed(self, failure: EpisodeFailure, *, attempt: int = 0) -> None:
        """Keep the reason why an attempt counts for nothing."""
        self._append(Failed(failure=failure, attempt=attempt))

    def sync(self) -> None:
        """Make everything so far durable: images first, so that a durable trajectory never lacks one."""
        self._images.sync()
        self._segment.sync()

    def seal(self) -> SealedStep:
        """Close both segments for good. May be repeated."""
        sealed = [image_segment] if (image_segment := self._images.seal()) else []
        sealed.insert(0, self._segment.seal())
        segments = tuple(replace(item, path=self.run.relative(Path(item.path))) for item in sealed)
        return SealedStep(step=self.step, segments=segments)

    def abandon(self) -> None:
        """Close both segments without sealing them: the step was dropped, no commit will name them."""
        self._images.abandon()
        self._segment.abandon()

    def adopt(self, adapter_sha256: str, *, finished: bool = True, unfinished: bool = True) -> Leftovers:
        """What lower epochs left for this step, sampled under `adapter_sha256` (the committed adapter before it).

        `finished`: copy finished trajectories with their images into this journal, durable on return. The first one
        of each key wins, in order of epoch, writer and offset. `unfinished`: read how far the others had come; this
        writes nothing, and whoever continues one records it again. One worker adopts what finished, every worker may
        read what did not. What is torn or damaged is left out and reported, never raised.
        """
        refs: dict[TrajectoryKey, TrajectoryRef] = {}
        damaged: list[str] = []
        foreign = 0
        running = RunningEpisodes(adapter_sha256)
        for path in _segments_below(self.run.trajectories(self.step), self.epoch):
            try:
                for record in read_records(path, require_sealed=False, on_torn=damaged.append):
                    if not isinstance(record, Finished):
                        if unfinished:
                            running.follow(record)
                        continue
                    ours = all(turn.adapter_sha256 == adapter_sha256 for turn in record.trajectory.turns)
                    running.finished(record.trajectory.key, counts=ours)
                    if not ours:
                        foreign += 1
                    elif finished and record.trajectory.key not in refs:
                        try:
                            refs[record.trajectory.key] = self._copy(record)
                        except CorruptionError as error:
                            damaged.append(f"{record.trajectory.key}: {error.message}")
            except CorruptionError as error:
                damaged.append(error.message)
        if finished:
            self.sync()
        return Leftovers(
            trajectories=tuple(refs.values()),
            foreign=foreign,
            damaged=tuple(damaged),
            unfinished=running.unfinished(),
        )

    def _copy(self, record: Finished) -> TrajectoryRef:
        turns = tuple(
            replace(turn, images=tuple(self._copy_image(ref) for ref in turn.images))
            for turn in record.trajectory.turns
        )
        return self.finished(replace(record.trajectory, turns=turns), image_patches=record.image_patches)

    def _copy_image(self, ref: ImageRef) -> ImageRef:
        known = self._images.find(ref.sha256)
        return known or self.image(Image(data=read_image(self.run, ref), width=ref.width, height=ref.height))

    def _append(self, record: Record) -> Location:
        return self._segment.append(encode_record(record))


def trajectory_ref(trajectory: Trajectory, segment: str, location: Location, image_patches: int) -> TrajectoryRef:
    """The scalars of a trajectory and where it lies; `segment` is relative to the run folder."""
    return TrajectoryRef(
        key=trajectory.key,
        segment=segment,
        offset=location.offset,
        length=location.length,
        reward=trajectory.reward,
        rewards=dict(trajectory.rewards),
        prompt_tokens=sum(len(turn.prompt_ids) for turn in trajectory.turns),
        response_tokens=sum(len(turn.response_ids) for turn in trajectory.turns),
        image_patches=image_patches,
        truncated=trajectory.end is EpisodeEnd.TRUNCATED,
        first_prompt_tokens=len(trajectory.turns[0].prompt_ids),
    )


def read_records(path: Path, *, require_sealed: bool, on_torn: Callable[[str], None] | None = None) -> Iterator[Record]:
    """The decoded records of a segment, as read_segment gives them."""
    for _, payload in read_segment(path, require_sealed=require_sealed, on_torn=on_torn):
        yield decode_record(payload)


def read_finished(run: RunFolder, segment: str, offset: int, length: int) -> Finished:
    """The `finished` record at a place that a commit or a TrajectoryRef names. Raises CorruptionError."""
    record = decode_record(read_record(run.absolute(segment), offset, length))
    if not isinstance(record, Finished):
        raise CorruptionError(f"{run.absolute(segment)} has no finished trajectory at byte {offset}")
    return record


def read_trajectory(run: RunFolder, ref: TrajectoryRef) -> Trajectory:
    """The trajectory behind `ref`, which a message named, checked. Raises CorruptionError."""
    await_visible(run.absolute(ref.segment), ref.offset + ref.length)
    trajectory = read_finished(run, ref.segment, ref.offset, ref.length).trajectory
    if trajectory.key != ref.key:
        raise CorruptionError(f"{ref.segment} holds {trajectory.key} at byte {ref.offset}, expected {ref.key}")
    return trajectory


def parse_segment_name(name: str) -> tuple[str, int] | None:
    """(writer, epoch) of a segment's file name; None if it is not one."""
    match = _SEGMENT_NAME.fullmatch(name)
    return (match["writer"], int(match["epoch"])) if match else None


def _segments_below(folder: Path, epoch: int) -> list[Path]:
    """Segments of lower epochs in a step's folder, by epoch, then by writer.

    This listing is safe: the epochs it looks for are over, and one that still appends adds nothing that counts.
    """
    found = []
    for path in list_folder(folder):
        parsed = parse_segment_name(path.name)
        if parsed and parsed[1] < epoch:
            found.append((parsed[1], parsed[0], path))
    return [path for _, _, path in sorted(found)]
