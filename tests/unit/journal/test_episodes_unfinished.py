from __future__ import annotations

from dataclasses import replace

import pytest

from argusrl.journal.episodes import EpisodeJournal
from argusrl.journal.records import Partial
from argusrl.types import EpisodeFailure, TrajectoryKey, Unfinished
from fakes.run_folder import RunBuilder, image, trajectory, turn

KEY = TrajectoryKey(1, "p0", 0)


class Writer:
    """Writes parts of one episode to a segment of the builder's epoch."""

    def __init__(self, builder: RunBuilder, writer: str = "w0") -> None:
        self.builder, self.adapter = builder, builder.head.adapter
        self.journal = builder.journal(1, writer)

    def started(self, key: TrajectoryKey = KEY, adapter: str | None = None) -> Writer:
        sha256 = adapter or self.adapter.sha256
        self.journal.started(key, attempt=0, seed=1, adapter_version=0, adapter_sha256=sha256, environment={})
        return self

    def turn(self, index: int, *ids: int, key: TrajectoryKey = KEY) -> Writer:
        self.journal.turn(key, index, turn(self.adapter, self.journal.image(image(index)), ids=ids))
        return self

    def partial(
        self, index: int, offset: int, *ids: int, key: TrajectoryKey = KEY, adapter: str | None = None
    ) -> Writer:
        span = Partial(
            key=key,
            turn=index,
            offset=offset,
            ids=ids,
            logprobs=tuple(-token / 8 for token in ids),
            adapter_version=0,
            adapter_sha256=adapter or self.adapter.sha256,
            place=f"before turn {index}",
        )
        self.journal.partial(span)
        return self

    def left(self, **what: bool) -> dict[TrajectoryKey, Unfinished]:
        """What the next epoch finds."""
        self.journal.abandon()
        self.builder.reopen()
        leftovers = self.builder.journal(1, "next").adopt(self.adapter.sha256, **what)
        assert leftovers.damaged == ()
        return dict(leftovers.unfinished)

    def come(self) -> tuple[list[tuple[int, ...]], tuple[int, ...]] | None:
        """Replies of whole turns, and the open one."""
        one = self.left().get(KEY)
        return one and ([turn.response_ids for turn in one.turns], one.ids)


@pytest.fixture
def writer(builder) -> Writer:
    return Writer(builder)


def test_turns_and_the_open_reply_are_found(writer):
    writer.started().partial(0, 0, 1, 2).turn(0, 1, 2, 3).partial(1, 0, 4).partial(1, 1, 5, 6)
    (found,) = writer.left().values()
    assert [one.response_ids for one in found.turns] == [(1, 2, 3)]
    assert found.turns[0].images[0].sha256 == image(0).sha256
    assert (found.ids, found.logprobs, found.place) == ((4, 5, 6), (-0.5, -0.625, -0.75), "before turn 1")


def test_reading_what_did_not_finish_writes_nothing_and_leaves_images_where_they_are(writer):
    writer.started().turn(0, 1, 2)
    writer.journal.finished(trajectory(TrajectoryKey(1, "p0", 9), turn(writer.adapter)), image_patches=0)
    writer.journal.abandon()
    writer.builder.reopen()
    journal = writer.builder.journal(1, "next")
    path = writer.builder.run.segment(1, "next", writer.builder.epoch.number)
    before = path.read_bytes()
    leftovers = journal.adopt(writer.adapter.sha256, finished=False, unfinished=True)
    assert list(leftovers.unfinished) == [KEY]
    assert leftovers.trajectories == ()
    assert path.read_bytes() == before
    assert not writer.builder.run.image_segment(1, "next", writer.builder.epoch.number).exists()


def test_what_nobody_asks_for_is_not_read(writer):
    assert writer.started().turn(0, 1).left(unfinished=False) == {}


@pytest.mark.parametrize(
    ("write", "come"),
    [
        (lambda w: w.started(), None),
        (lambda w: w.turn(0, 1), None),  # nobody says under which adapter
        (lambda w: w.started().turn(0, 1).started(), None),
        (lambda w: w.started().turn(0, 1).started().partial(0, 0, 7), ([], (7,))),
        (lambda w: w.started().turn(0, 1).turn(1, 2).turn(0, 3), ([(3,)], ())),
        (lambda w: w.started().turn(0, 1).partial(1, 0, 2).turn(0, 3), ([(3,)], ())),
        (lambda w: w.started().partial(0, 0, 1, 2).partial(0, 0, 3), ([], (3,))),
        (lambda w: w.started().turn(0, 1).turn(1, 2).partial(0, 0, 3), ([], (3,))),  # a retry is in its first turn
        (lambda w: w.started().turn(0, 1).partial(0, 1, 3), ([(1,)], ())),
        (lambda w: w.started().partial(0, 0, 1).partial(0, 3, 4), ([], (1,))),  # a gap: what lies before it
        (lambda w: w.started().partial(0, 0, 1).turn(1, 2), ([], (1,))),
        (lambda w: w.started().partial(1, 0, 1), None),
    ],
)
def test_the_newest_try_counts(writer, write, come):
    write(writer)
    assert writer.come() == come


@pytest.mark.parametrize("where", ["started", "partial"])
def test_another_adapter_sampled_it(writer, where):
    writer.started(adapter="another" if where == "started" else None)
    writer.partial(0, 0, 1, adapter="another" if where == "partial" else None)
    assert writer.come() is None


def test_a_newer_start_under_another_adapter_ends_it(writer):
    assert writer.started().partial(0, 0, 1).started(adapter="another").come() is None


def test_what_finished_or_failed_is_not_unfinished(writer):
    other = replace(KEY, sample=1)
    writer.started().turn(0, 1).started(other).partial(0, 0, 2, key=other)
    writer.journal.finished(trajectory(KEY, turn(writer.adapter)), image_patches=0)
    writer.journal.failed(EpisodeFailure(key=other, kind="reward", source="f", message="raised"))
    assert writer.left() == {}


def test_what_finished_counts_although_it_was_begun_again_later(builder):
    first = Writer(builder)
    first.started().turn(0, 1).journal.finished(trajectory(KEY, turn(first.adapter)), image_patches=0)
    first.journal.abandon()
    builder.reopen()
    assert Writer(builder).started().partial(0, 0, 1).left() == {}


def test_a_failed_episode_may_be_begun_again(writer):
    writer.started().turn(0, 1)
    writer.journal.failed(EpisodeFailure(key=KEY, kind="timeout", source="engine", message="slow"))
    assert writer.started().partial(0, 0, 5).come() == ([], (5,))


def test_a_later_epoch_takes_the_place_of_an_earlier_one(builder):
    Writer(builder).started().turn(0, 1).turn(1, 2).journal.abandon()
    builder.reopen()
    assert Writer(builder).started().turn(0, 3).come() == ([(3,)], ())


def test_cut_at_every_byte_of_the_last_records_the_ones_before_are_read(builder):
    writer = Writer(builder)
    path = builder.run.segment(1, "w0", builder.epoch.number)
    writer.started().turn(0, 1, 2).partial(1, 0, 3)
    ends = [path.stat().st_size]
    for record in (lambda: writer.partial(1, 1, 4, 5), lambda: writer.turn(1, 3, 4, 5, 6)):
        record()
        ends.append(path.stat().st_size)
    writer.journal.abandon()
    data = path.read_bytes()
    builder.reopen()
    journal = EpisodeJournal(builder.run, 1, builder.epoch.number, "next")
    expected = [([(1, 2)], (3,)), ([(1, 2)], (3, 4, 5)), ([(1, 2), (3, 4, 5, 6)], ())]
    for length in range(ends[0], ends[2] + 1):
        path.write_bytes(data[:length])
        leftovers = journal.adopt(writer.adapter.sha256, finished=False)
        one = leftovers.unfinished[KEY]
        complete = sum(length >= end for end in ends) - 1
        assert ([turn.response_ids for turn in one.turns], one.ids) == expected[complete]
        assert len(leftovers.damaged) == (length not in ends)
        assert all(str(path) in line for line in leftovers.damaged)


def test_a_damaged_byte_is_reported_and_ends_its_segment_alone(builder):
    first = Writer(builder, "a").started().turn(0, 1)
    path = builder.run.segment(1, "a", builder.epoch.number)
    end = path.stat().st_size
    first.turn(1, 2)
    second = Writer(builder, "b").started(replace(KEY, sample=1)).partial(0, 0, 9, key=replace(KEY, sample=1))
    for one in (first, second):
        one.journal.seal()
    data = bytearray(path.read_bytes())
    data[end + 20] ^= 1
    path.write_bytes(data)
    builder.reopen()
    leftovers = builder.journal(1, "next").adopt(first.adapter.sha256)
    assert [len(one.turns) + len(one.ids) for one in leftovers.unfinished.values()] == [1, 1]
    assert len(leftovers.damaged) == 1
    assert str(path) in leftovers.damaged[0]
