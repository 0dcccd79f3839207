"""Publication: whole and durable, or not there."""

import errno
import os

import pytest

from argusrl.errors import StorageError
from argusrl.storage.publish import (
    append_line,
    make_folder,
    publish_file,
    publish_folder,
    read_lines,
    replace_file,
    storage_error,
)


def raising(code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


def test_a_published_file_is_whole_and_leaves_nothing_else(tmp_path):
    publish_file(tmp_path / "new" / "a.json", b"hello")
    assert (tmp_path / "new" / "a.json").read_bytes() == b"hello"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_a_name_is_given_once(tmp_path):
    publish_file(tmp_path / "a", b"first")
    with pytest.raises(FileExistsError):
        publish_file(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_link_that_nfs_repeated_is_a_success(tmp_path, monkeypatch):
    link = os.link

    def twice(source, target):
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    publish_file(tmp_path / "a", b"mine")
    assert (tmp_path / "a").read_bytes() == b"mine"


@pytest.mark.parametrize("publish", [publish_file, replace_file])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failed_write_leaves_no_name(tmp_path, monkeypatch, publish, code):
    monkeypatch.setattr(os, "write", raising(code))
    with pytest.raises(StorageError) as caught:
        publish(tmp_path / "a", b"data")
    assert os.strerror(code) in caught.value.message
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("publish", [publish_file, replace_file])
def test_a_failed_fsync_of_the_data_leaves_no_name(tmp_path, monkeypatch, publish):
    monkeypatch.setattr(os, "fsync", raising(errno.EIO))
    with pytest.raises(StorageError):
        publish(tmp_path / "a", b"data")
    assert list(tmp_path.iterdir()) == []


def append(path, data):
    append_line(path, {"data": data.decode()})


@pytest.mark.parametrize("publish", [publish_file, replace_file, append])
@pytest.mark.parametrize("failing", [0, 1])
def test_no_failed_fsync_is_acknowledged(tmp_path, monkeypatch, publish, failing):
    calls = []

    def fsync(_):
        calls.append(None)
        if len(calls) == failing + 1:
            raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="injected"):
        publish(tmp_path / "a", b"data")
    assert len(calls) == failing + 1, "an fsync that failed is not tried again"


def test_short_writes_are_continued(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    publish_file(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_replacing_keeps_the_old_bytes_until_the_new_ones_are_whole(tmp_path, monkeypatch):
    replace_file(tmp_path / "beat", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raising(errno.EIO))
        with pytest.raises(StorageError):
            replace_file(tmp_path / "beat", b"new")
    assert (tmp_path / "beat").read_bytes() == b"old"
    replace_file(tmp_path / "beat", b"new")
    assert (tmp_path / "beat").read_bytes() == b"new"


def test_a_folder_appears_at_once(tmp_path):
    with publish_folder(tmp_path / "f") as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "x").write_bytes(b"1")
        assert not (tmp_path / "f").exists()
    assert (tmp_path / "f" / "inner" / "x").read_bytes() == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("content", [[], ["x"]])
def test_a_folder_is_never_put_over_another(tmp_path, content):
    (tmp_path / "f").mkdir()
    for name in content:
        (tmp_path / "f" / name).touch()
    with pytest.raises(FileExistsError), publish_folder(tmp_path / "f") as temporary:
        (temporary / "y").touch()
    assert [path.name for path in (tmp_path / "f").iterdir()] == content
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_folder_whose_body_or_fsync_failed_does_not_appear(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError), publish_folder(tmp_path / "f"):
        raise RuntimeError
    monkeypatch.setattr(os, "fsync", raising(errno.ENOSPC))
    with pytest.raises(StorageError), publish_folder(tmp_path / "f") as temporary:
        (temporary / "x").touch()
    assert list(tmp_path.iterdir()) == []


def test_every_file_and_folder_is_made_durable(tmp_path, monkeypatch):
    make_folder(tmp_path)  # whose own name this process does not know to be durable before
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    with publish_folder(tmp_path / "f") as temporary:
        (temporary / "inner").mkdir()
        (temporary / "inner" / "x").touch()
    t = str(temporary)
    assert synced == [f"{t}/inner/x", f"{t}/inner", t, str(tmp_path)]


def test_a_folder_that_another_process_made_is_made_durable_once(tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    make_folder(tmp_path / "theirs")
    make_folder(tmp_path / "theirs")
    assert synced == [str(tmp_path)]


def test_lines_survive_a_torn_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path) == []
    append_line(path, {"step": 1, "loss": float("nan")})
    append_line(path, {"step": 2})
    path.write_bytes(path.read_bytes() + b'{"step": 3, "lo')
    assert [line["step"] for line in read_lines(path)] == [1, 2]
    append_line(path, {"step": 3})
    assert read_lines(path) == [{"step": 1, "loss": "NaN"}, {"step": 2}, {"step": 3}]


def test_a_line_torn_at_any_byte_hides_no_other(tmp_path):
    path = tmp_path / "events.jsonl"
    append_line(path, {"n": 1})
    whole = path.stat().st_size
    append_line(path, {"n": 2})
    data = path.read_bytes()
    for size in range(whole, len(data)):
        path.write_bytes(data[:size])
        assert read_lines(path) == [{"n": 1}]
        append_line(path, {"n": 3})
        assert [line["n"] for line in read_lines(path)] in ([1, 3], [1, 2, 3])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EBUSY])
def test_errors_say_where_what_and_what_to_do(tmp_path, code):
    error = storage_error(OSError(code, os.strerror(code)), tmp_path / "x")
    assert str(tmp_path / "x") in error.message
    assert os.strerror(code) in error.message
    assert error.hint


@pytest.mark.parametrize(
    "write",
    [
        lambda run: publish_file(run / "commits" / "2.json", b""),
        lambda run: replace_file(run / "heartbeat.json", b""),
        lambda run: append_line(run / "events.jsonl", {}),
        lambda run: make_folder(run / "trajectories" / "2"),
    ],
)
def test_nothing_is_made_in_the_place_of_a_folder_that_went_away(tmp_path, write):
    run = tmp_path / "run"
    make_folder(run / "commits")
    run.rename(tmp_path / "away")
    with pytest.raises(StorageError, match="gone"):
        write(run)
    assert not run.exists()
    (tmp_path / "away").rename(run)
    write(run)


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(StorageError, match="is a file, not a folder"):
        publish_file(tmp_path / "runs" / "a", b"")
