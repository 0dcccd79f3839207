import errno
import os

import pytest

from argusrl.errors import StorageError
from argusrl.storage.filesystem import file_system
from argusrl.storage.probe import probe_root


def refusing(*_):
    raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


def test_a_local_disk_passes_and_stays_clean(tmp_path):
    result = probe_root(tmp_path / "runs")
    assert result.root == tmp_path / "runs"
    assert result.free.bytes > 0
    assert result.file_system == file_system(tmp_path)
    assert result.fsync_seconds > 0
    assert result.write_bytes_per_second > 0
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(("call", "what"), [("link", "hard link"), ("replace", "by rename"), ("rename", "a folder")])
def test_a_root_without_link_or_rename_is_refused(tmp_path, monkeypatch, call, what):
    monkeypatch.setattr(os, call, refusing)
    with pytest.raises(StorageError, match=what) as caught:
        probe_root(tmp_path)
    assert "S3" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_lets_a_name_be_linked_twice_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda source, target: target.write_bytes(source.read_bytes()))
    with pytest.raises(StorageError, match="was not refused"):
        probe_root(tmp_path)


def test_a_full_or_failing_disk_is_a_storage_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refusing)
    with pytest.raises(StorageError):
        probe_root(tmp_path)
    assert list(tmp_path.iterdir()) == []
