from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from contextlib import suppress

import pytest

from argusrl.errors import StorageError
from argusrl.recovery import storage_wait
from argusrl.recovery.storage_wait import await_storage, free_space_problem, storage_problem, write_problem
from argusrl.storage.digests import sha256_bytes
from argusrl.storage.layout import RunFolder

HEAD = sha256_bytes(b"two")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_wait, "_FIRST_PAUSE_SECONDS", 0.01)
    folder = RunFolder(tmp_path / "run")
    fill(folder)
    return folder


def fill(folder: RunFolder) -> None:
    folder.commits.mkdir(parents=True)
    folder.config.write_text("format_version: 1")
    for step, text in enumerate(("zero", "one", "two")):
        folder.commit(step).write_text(text)


def wait(folder, *, seconds: float = 20.0, needed_bytes: int = 0, say=lambda _: None, head: str = HEAD) -> float:
    return asyncio.run(await_storage(folder, head, deadline_seconds=seconds, needed_bytes=needed_bytes, say=say))


def test_a_sound_folder_is_not_waited_for_and_nothing_is_left_in_it(folder):
    before = sorted(folder.path.rglob("*"))
    assert wait(folder) >= 0
    assert sorted(folder.path.rglob("*")) == before


def test_a_folder_that_comes_back_is_gone_on_with(folder, tmp_path):
    folder.path.rename(tmp_path / "away")
    said = []

    def say(text):
        said.append(text)
        (tmp_path / "away").rename(folder.path)

    wait(folder, say=say)
    assert len(said) == 1
    assert "is not there" in said[0]


def test_a_folder_that_stays_away_is_never_made_anew(folder, tmp_path):
    folder.path.rename(tmp_path / "away")
    with pytest.raises(StorageError, match="is not there"):
        wait(folder, seconds=0.05)
    assert not folder.path.exists()


def test_another_folder_in_its_place_is_not_it(folder):
    folder.commit(2).unlink()
    assert "does not hold the last commit" in (storage_problem(folder, HEAD) or "")
    folder.commit(2).write_text("tvo")
    assert "does not hold the last commit" in (storage_problem(folder, HEAD) or "")
    with pytest.raises(StorageError, match="last commit"):
        wait(folder, seconds=0.05)


def test_later_commits_of_another_driver_are_for_the_fence(folder):
    folder.commit(3).write_text("three")
    assert storage_problem(folder, HEAD) is None


def test_a_run_without_commits_needs_its_config_alone(folder):
    for step in range(3):
        folder.commit(step).unlink()
    assert storage_problem(folder, "") is None


def test_too_little_space_is_waited_for(folder):
    with pytest.raises(StorageError, match="of free space"):
        wait(folder, seconds=0.03, needed_bytes=1 << 60)
    assert free_space_problem(folder, 0) is None
    assert "are needed" in (free_space_problem(folder, 1 << 60) or "")


@pytest.mark.parametrize("call", ["fsync", "link", "open"])
def test_a_folder_that_takes_no_writes_is_waited_for(folder, monkeypatch, call):
    def fails(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        assert "No space left" in (write_problem(folder) or "")
    assert write_problem(folder) is None
    assert not list(folder.path.glob(".*"))


def test_each_reason_is_said_once(folder, monkeypatch):
    problems = iter(["a", "a", "b", "b", None])
    monkeypatch.setattr(storage_wait, "storage_problem", lambda *_: next(problems))
    said = []
    wait(folder, say=said.append)
    assert [text[-1] for text in said] == ["a", "b"]


def test_a_real_file_system_that_is_full_unmounted_and_mounted_again(tmp_path, monkeypatch):
    mount = tmp_path / "mount"
    mount.mkdir()
    image = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]
    if subprocess.run(image, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    monkeypatch.setattr(storage_wait, "_FIRST_PAUSE_SECONDS", 0.01)
    folder, bound = RunFolder(mount / "run"), tmp_path / "bound"
    try:
        fill(folder)
        full = mount / "full"
        with suppress(OSError), full.open("wb", buffering=0) as file:
            for _ in range(5):
                file.write(bytes(1 << 20))
        assert write_problem(folder) is not None
        assert free_space_problem(folder, 1 << 20) is not None
        wait(folder, needed_bytes=1 << 20, say=lambda _: full.unlink())

        bound.mkdir()  # keeps the file system while its own mount point is empty
        subprocess.run(["mount", "--bind", mount, bound], check=True)
        subprocess.run(["umount", mount], check=True)
        assert "is not there" in (storage_problem(folder, HEAD) or "")
        wait(folder, say=lambda _: subprocess.run(["mount", "--bind", bound, mount], check=True))
    finally:
        for place in (mount, bound):
            subprocess.run(["umount", place], capture_output=True)
