import errno
import os

import pytest

from argusrl.recovery.storage_wait import free_space_problem
from argusrl.storage.free_space import FreeSpace, byte_text, free_space, why_full
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import storage_error

LFS_DF = """\
UUID                   1K-blocks        Used   Available Use% Mounted on
abcd-MDT0000_UUID       34652992       68132    34582812   1% {path}[MDT:0]
abcd-OST0000_UUID     1170351060     1000000   {first} 80% {path}[OST:0]
abcd-OST0001_UUID     1170351060  1170000000   {second} 99% {path}[OST:1]
OST0002             : inactive device

filesystem_summary:   2340702120  1171000000  1169702120  50% {path}
"""


@pytest.fixture
def lfs(tmp_path, monkeypatch):
    """Puts an `lfs` on PATH that says so many KiB are free on each of two targets."""

    def put(first: int, second: int, script: str | None = None) -> None:
        program = tmp_path / "bin" / "lfs"
        program.parent.mkdir(exist_ok=True)
        text = LFS_DF.format(path=tmp_path, first=first, second=second)
        program.write_text(script or f"#!/bin/sh\n[ \"$1\" = df ] || exit 9\ncat <<'END'\n{text}END\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    return put


def test_without_lustre_it_is_what_df_says(tmp_path):
    found = free_space(tmp_path)
    assert found.target == ""
    assert found.bytes == found.total_bytes > 0


def test_the_fullest_target_counts(tmp_path, lfs):
    lfs(900_000_000, 2048)
    found = free_space(tmp_path)
    assert (found.target, found.bytes) == ("abcd-OST0001_UUID", 2 << 20)
    assert found.describe().startswith("2 MiB of free space on OST abcd-OST0001_UUID (the file system as a whole has ")


def test_a_full_target_keeps_a_step_from_beginning(tmp_path, lfs):
    lfs(900_000_000, 1024)
    problem = free_space_problem(RunFolder(tmp_path), 4 << 20)
    assert "OST abcd-OST0001_UUID" in problem
    assert "4 MiB are needed" in problem
    lfs(900_000_000, 900_000_000)
    assert free_space_problem(RunFolder(tmp_path), 4 << 20) is None


@pytest.mark.parametrize("script", ["#!/bin/sh\necho 'not a Lustre mount' >&2\nexit 1\n", "#!/no/such/shell\n"])
def test_an_lfs_that_fails_is_not_asked_again(tmp_path, lfs, script):
    lfs(0, 0, script)
    assert free_space(tmp_path).target == ""


def test_an_lfs_that_hangs_is_given_up(tmp_path, lfs, monkeypatch):
    monkeypatch.setattr("argusrl.storage.free_space._LFS_SECONDS", 0.05)
    lfs(0, 0, "#!/bin/sh\nexec sleep 60\n")
    assert free_space(tmp_path).target == ""


def test_no_space_although_df_shows_some_is_explained(tmp_path, lfs):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "quota" in storage_error(full, tmp_path / "gone" / "file").message
    lfs(900_000_000, 0)
    message = storage_error(full, tmp_path / "file").message
    assert "No space left on device (df shows" in message
    assert "OST abcd-OST0001_UUID is full" in message


def test_other_errors_ask_nobody(tmp_path, lfs):
    lfs(900_000_000, 0)
    denied = OSError(errno.EACCES, os.strerror(errno.EACCES))
    assert "OST" not in storage_error(denied, tmp_path).message
    assert why_full(tmp_path / "a" / "b") != ""


def test_a_disk_that_df_shows_full_needs_no_words(tmp_path, monkeypatch):
    monkeypatch.setattr("argusrl.storage.free_space.free_space", lambda path: FreeSpace(1 << 20))
    assert why_full(tmp_path) == ""


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "0.999 KiB"),
        (5_500_000, "5.25 MiB"),
        (2 << 40, "2 TiB"),
        (3 << 50, "3 PiB"),
    ],
)
def test_bytes_for_people(count, text):
    assert byte_text(count) == text
