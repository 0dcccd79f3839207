import threading
import time

import msgspec
import pytest

from argusrl.errors import CorruptionError
from argusrl.journal.commits import Adopted, Commit, CommitChain, encode_commit
from argusrl.journal.episodes import read_trajectory
from argusrl.journal.epochs import claim_epoch
from argusrl.journal.images import read_image
from argusrl.storage import visibility
from argusrl.storage.adapter_folder import read_adapter
from argusrl.storage.publish import publish_file
from argusrl.storage.visibility import await_visible
from fakes.late_names import elsewhere, late_names
from fakes.run_folder import RunBuilder, image, memory_folder, publish_adapter

LATE = 0.15


@pytest.fixture
def tmp_path():
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def patient(monkeypatch):
    """This folder is on a file system that may be late."""
    monkeypatch.setattr(visibility, "patience_seconds", lambda folder: 10.0)
    monkeypatch.setattr(visibility, "_missed", set())


def test_on_a_coherent_file_system_nobody_waits(tmp_path):
    started = time.monotonic()
    await_visible(tmp_path / "never")
    assert time.monotonic() - started < 1


@pytest.mark.usefixtures("patient")
def test_a_size_is_waited_for(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"half")
    timer = threading.Timer(LATE, lambda: path.write_bytes(b"the whole"))
    timer.start()
    await_visible(path, 9)
    assert path.read_bytes() == b"the whole"
    timer.join()


def test_what_never_comes_is_waited_for_once(tmp_path, monkeypatch, patient):
    monkeypatch.setattr(visibility, "patience_seconds", lambda folder: 0.1)
    await_visible(tmp_path / "never")
    monkeypatch.setattr(visibility, "patience_seconds", lambda folder: 1e9)
    await_visible(tmp_path / "never")


@pytest.mark.usefixtures("patient")
def test_an_engine_waits_for_an_adapter(tmp_path):
    builder = RunBuilder(tmp_path)
    with late_names(tmp_path, LATE) as late:
        reference = elsewhere(lambda: publish_adapter(builder.run, 1, 1))
        folder = builder.run.absolute(reference.path)
        assert not folder.exists()
        assert read_adapter(folder).config == b'{"r": 8}'
        assert late.refusals > 1


@pytest.mark.usefixtures("patient")
def test_a_rank_waits_for_trajectories_and_images(tmp_path):
    builder = RunBuilder(tmp_path)

    def play():
        journal = builder.journal(1, "elsewhere")
        seen = journal.image(image(5))
        reference = builder.play(journal, "p0", 0)
        journal.seal()
        return reference, seen

    with late_names(tmp_path, LATE) as late:
        reference, seen = elsewhere(play)
        assert not builder.run.absolute(reference.segment).exists()
        assert read_trajectory(builder.run, reference).key == reference.key
        assert read_image(builder.run, seen) == image(5).data
        assert late.refusals > 1


@pytest.mark.usefixtures("patient")
def test_a_commit_that_another_driver_wrote_is_read_although_its_name_comes_late(tmp_path):
    builder = RunBuilder(tmp_path)
    before = builder.head

    def commit(epoch):
        return Commit(step=1, epoch=epoch, outcome="updated", adapter=before.adapter, state_digest="")

    newer = CommitChain(builder.run, claim_epoch(builder.run))
    newer.head()
    theirs = msgspec.structs.replace(commit(1), previous=newer.head_sha256)
    with late_names(tmp_path, LATE) as late:
        elsewhere(lambda: publish_file(builder.run.commit(1), encode_commit(theirs)))
        assert not builder.run.commit(1).exists()
        with pytest.raises(Adopted) as caught:
            newer.append(commit(2))
        assert late.refusals > 1
    assert caught.value.commit.epoch == 1


@pytest.mark.usefixtures("patient")
def test_what_is_damaged_is_still_told(tmp_path, monkeypatch):
    builder = RunBuilder(tmp_path)
    folder = builder.run.absolute(builder.head.adapter.path)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    monkeypatch.setattr(visibility, "patience_seconds", lambda folder: 0.1)
    with pytest.raises(CorruptionError, match="its manifest says"):
        read_adapter(folder)
