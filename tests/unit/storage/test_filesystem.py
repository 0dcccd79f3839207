from pathlib import Path

import pytest

from argusrl.errors import StorageUnusable
from argusrl.recovery.resume import RunChoice, create_run
from argusrl.storage import filesystem
from argusrl.storage.filesystem import file_system, refuse_object_store
from argusrl.storage.layout import RunFolder
from argusrl.storage.probe import probe_root

MOUNTS = r"""
22 1 0:20 / / rw,relatime - overlay overlay rw,lowerdir=/a
23 22 0:21 / /dev/shm rw - tmpfs shm rw
30 22 0:30 / /fsx rw,relatime - lustre 10.0.0.1@tcp:/abcdefgh rw,flock
31 22 0:31 / /efs rw - nfs4 fs-1.efs.eu.amazonaws.com:/ rw,vers=4.1
32 22 0:32 / /s3 rw,nosuid - fuse mountpoint-s3 rw,user_id=0
33 22 0:33 / /old\040bucket rw - fuse.s3fs s3fs rw
34 22 0:34 / /goofy rw - fuse.goofys my-bucket rw
35 30 0:35 / /fsx/scratch rw shared:7 master:2 - ext4 /dev/nvme1n1 rw
36 22 0:36 / /efs rw - ext4 /dev/sdb rw
37 22 0:37 / /images rw - fuse.squashfuse squashfuse ro
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind", "mount"),
    [
        ("/fsx/runs/demo", "lustre", "/fsx"),
        ("/fsx/scratch/runs", "ext4", "/fsx/scratch"),
        ("/fsxtra", "overlay", "/"),
        ("/dev/shm/x", "tmpfs", "/dev/shm"),
        ("/efs/runs", "ext4", "/efs"),  # mounted over the other one
        ("/old bucket/runs", "fuse.s3fs", "/old bucket"),
    ],
)
def test_the_innermost_mount_counts(path, kind, mount):
    found = file_system(Path(path), MOUNTS)
    assert (found.kind, found.mount) == (kind, Path(mount))


@pytest.mark.parametrize(
    ("path", "name"), [("/s3/runs", "Mountpoint for Amazon S3"), ("/old bucket", "s3fs"), ("/goofy", "goofys")]
)
def test_object_stores_are_refused_with_the_reason(path, name):
    with pytest.raises(StorageUnusable, match="renamed, linked or appended") as caught:
        refuse_object_store(Path(path), MOUNTS)
    assert name in caught.value.message
    assert "run.copy_to" in caught.value.hint


@pytest.mark.parametrize("path", ["/fsx", "/dev/shm", "/images", "/"])
def test_others_are_not(path):
    refuse_object_store(Path(path), MOUNTS)


def test_only_some_are_late():
    nfs = MOUNTS.replace("36 22 0:36 / /efs rw - ext4 /dev/sdb rw", "")
    assert file_system(Path("/efs/x"), nfs).visible_after_seconds > 60
    assert "late" in file_system(Path("/efs/x"), nfs).describe()
    assert file_system(Path("/images/x"), MOUNTS).visible_after_seconds > 60
    assert file_system(Path("/fsx/x"), MOUNTS).visible_after_seconds == 0
    assert "at once" in file_system(Path("/fsx/x"), MOUNTS).describe()


def test_this_machine_tells(tmp_path):
    assert file_system(tmp_path).kind != "unknown"
    assert file_system(tmp_path, "").kind == "unknown"


def test_a_root_on_one_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 1 0:1 / {tmp_path}/bucket rw - fuse mountpoint-s3 rw\n")
    monkeypatch.setattr(filesystem, "_MOUNTS", mounts)
    with pytest.raises(StorageUnusable, match="Mountpoint for Amazon S3"):
        probe_root(tmp_path / "bucket" / "runs")
    with pytest.raises(StorageUnusable, match="Mountpoint for Amazon S3"):
        create_run(RunChoice("new", RunFolder(tmp_path / "bucket" / "runs" / "demo"), None, ""))
    assert not (tmp_path / "bucket").exists()
