import os
from dataclasses import replace

import pytest

from argusrl.errors import CorruptionError
from argusrl.journal.episodes import EpisodeJournal, parse_segment_name, read_finished, read_records, read_trajectory
from argusrl.journal.images import read_image
from argusrl.journal.records import Failed, Finished, Partial, Started, TurnDone
from argusrl.types import EpisodeEnd, EpisodeFailure, TrajectoryKey
from fakes.run_folder import image, trajectory, turn


def test_what_a_worker_writes_is_what_readers_get(builder):
    run, journal = builder.run, builder.journal(1)
    ref = builder.play(journal, "p0", 0)
    journal.failed(EpisodeFailure(key=TrajectoryKey(1, "p0", 1), kind="reward", source="f", message="raised"))
    sealed = journal.seal()
    assert sealed == journal.seal()
    assert [segment.path for segment in sealed.segments] == [
        "trajectories/000001/w0.e0001.seg",
        "images/000001/w0.e0001.seg",
    ]
    kinds = [type(record) for record in read_records(run.absolute(ref.segment), require_sealed=True)]
    assert kinds == [Started, Partial, TurnDone, Finished, Failed]
    back = read_trajectory(run, ref)
    assert back.key == TrajectoryKey(1, "p0", 0)
    assert [read_image(run, turn.images[0]) for turn in back.turns] == [image(0).data, image(1).data]
    assert read_finished(run, ref.segment, ref.offset, ref.length).image_patches == 24


def test_a_ref_holds_the_scalars(builder):
    journal = builder.journal(1)
    ref = builder.play(journal, "p0", 0, reward=0.25)
    assert (ref.prompt_tokens, ref.response_tokens, ref.image_patches) == (8, 5, 24)
    assert (ref.reward, ref.rewards, ref.truncated) == (0.25, {"exact": 0.25}, False)
    cut = replace(trajectory(TrajectoryKey(1, "p0", 9), turn(builder.head.adapter)), end=EpisodeEnd.TRUNCATED)
    assert journal.finished(cut, image_patches=0).truncated


def test_a_ref_to_another_trajectory_is_corruption(builder):
    journal = builder.journal(1)
    refs = [builder.play(journal, "p0", sample) for sample in range(2)]
    journal.seal()
    with pytest.raises(CorruptionError, match="expected"):
        read_trajectory(builder.run, replace(refs[0], offset=refs[1].offset, length=refs[1].length))


def test_images_are_durable_before_the_trajectories_that_show_them(builder, monkeypatch):
    journal = builder.journal(1)
    builder.play(journal, "p0", 0)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    journal.sync()
    assert synced == [str(builder.run.image_segment(1, "w0", 1)), str(builder.run.segment(1, "w0", 1))]


def test_a_text_only_step_has_one_segment(builder):
    journal = builder.journal(1)
    journal.finished(trajectory(TrajectoryKey(1, "p", 0), turn(builder.head.adapter)), image_patches=0)
    assert len(journal.seal().segments) == 1


def test_a_writer_name_serves_once_per_step_and_epoch(builder):
    builder.journal(1).abandon()
    with pytest.raises(FileExistsError):
        builder.journal(1)
    builder.reopen()
    builder.journal(1).abandon()


@pytest.mark.parametrize("ending", ["seal", "abandon"])
def test_finished_work_of_a_dead_driver_is_adopted_with_its_images(builder, ending):
    old = builder.journal(1)
    refs = [builder.play(old, "p0", sample, reward=sample) for sample in range(3)]
    getattr(old, ending)()
    originals = {ref.key: read_trajectory(builder.run, ref) for ref in refs}
    builder.reopen()
    journal = builder.journal(1, "adopt")
    leftovers = journal.adopt(builder.head.adapter.sha256)
    journal.seal()
    assert (leftovers.foreign, leftovers.damaged) == (0, ())
    assert [ref.key for ref in leftovers.trajectories] == [ref.key for ref in refs]
    for ref in leftovers.trajectories:
        assert ref.segment == "trajectories/000001/adopt.e0002.seg"
        back = read_trajectory(builder.run, ref)
        assert back.reward == originals[ref.key].reward
        for now, before in zip(back.turns, originals[ref.key].turns, strict=True):
            assert now.response_ids == before.response_ids
            assert {image.segment for image in now.images} == {"images/000001/adopt.e0002.seg"}
            assert read_image(builder.run, now.images[0]) == read_image(builder.run, before.images[0])


def test_the_first_of_each_key_wins_by_epoch_then_writer(builder):
    for writer, reward in (("b", 2.0), ("a", 1.0)):
        journal = builder.journal(1, writer)
        builder.play(journal, "p0", 0, reward=reward)
        journal.abandon()
    builder.reopen()
    journal = builder.journal(1, "a")
    builder.play(journal, "p0", 0, reward=3.0)
    builder.play(journal, "p0", 1, reward=4.0)
    journal.seal()
    builder.reopen()
    leftovers = builder.journal(1).adopt(builder.head.adapter.sha256)
    assert [(ref.key.sample, ref.reward) for ref in leftovers.trajectories] == [(0, 1.0), (1, 4.0)]


def test_own_and_higher_epochs_and_other_steps_are_left_alone(builder):
    builder.play(builder.journal(1, "mine"), "p0", 0)
    builder.play(builder.journal(2, "w"), "p0", 0)
    journal = builder.journal(1, "adopt")
    assert journal.adopt(builder.head.adapter.sha256).trajectories == ()
    higher = EpisodeJournal(builder.run, 1, 9, "w")
    builder.play(higher, "p1", 0)
    assert journal.adopt(builder.head.adapter.sha256).trajectories == ()


def test_what_another_adapter_sampled_does_not_count(builder):
    builder.play(builder.journal(1), "p0", 0)
    builder.reopen()
    leftovers = builder.journal(1).adopt("another adapter")
    assert (leftovers.trajectories, leftovers.foreign) == ((), 1)


def test_a_trajectory_whose_image_is_damaged_is_left_out_and_named(builder):
    old = builder.journal(1)
    builder.play(old, "p0", 0)
    old.sync()
    shared = builder.run.image_segment(1, "w0", 1).stat().st_size
    builder.play(old, "p0", 1)
    old.abandon()
    path = builder.run.image_segment(1, "w0", 1)
    path.write_bytes(path.read_bytes()[: shared + 5])
    builder.reopen()
    leftovers = builder.journal(1).adopt(builder.head.adapter.sha256)
    assert [ref.key.sample for ref in leftovers.trajectories] == [0]
    assert len(leftovers.damaged) == 1
    assert "sample=1" in leftovers.damaged[0]


def test_a_damaged_sealed_leftover_gives_what_lies_before_the_damage(builder):
    old = builder.journal(1)
    refs = [builder.play(old, "p0", sample) for sample in range(2)]
    old.seal()
    path = builder.run.absolute(refs[1].segment)
    data = bytearray(path.read_bytes())
    data[refs[1].offset + 30] ^= 4
    path.write_bytes(data)
    builder.reopen()
    leftovers = builder.journal(1).adopt(builder.head.adapter.sha256)
    assert [ref.key for ref in leftovers.trajectories] == [refs[0].key]
    assert str(path) in leftovers.damaged[0]


def test_segment_names():
    assert parse_segment_name("w0.e0003.seg") == ("w0", 3)
    assert parse_segment_name("a.b.e12345.seg") == ("a.b", 12345)
    assert parse_segment_name("w0.seg") is None
