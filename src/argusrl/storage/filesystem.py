"""What a folder lies on: the kind of file system, whether others see it, and how late they may."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from argusrl.errors import StorageUnusable

_MOUNTS = Path("/proc/self/mountinfo")
_OBJECT_STORES = {
    "mountpoint-s3": "Mountpoint for Amazon S3",
    "s3fs": "s3fs (Amazon S3)",
    "goofys": "goofys (Amazon S3)",
    "geesefs": "GeeseFS (Amazon S3)",
    "rclone": "rclone mount (an object store)",
    "gcsfuse": "Cloud Storage FUSE",
    "blobfuse2": "BlobFuse (Azure Blob Storage)",
    "blobfuse": "BlobFuse (Azure Blob Storage)",
}
_COHERENT = frozenset({"lustre", "beegfs", "gpfs", "wekafs", "ceph"})  # shared, and a new name is seen at once
_LATE = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse", "glusterfs"})  # clients cache names
_LATE_SECONDS = 75.0  # NFS clients keep what they know of a folder for up to 60 s (acdirmax)
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class FileSystem:
    """What is mounted under a path."""

    kind: str  # as the kernel calls it: "lustre", "nfs4", "ext4", "fuse.s3fs"; "unknown" where it does not tell
    source: str  # what is mounted: a device, host:/export, mountpoint-s3
    mount: Path

    @property
    def object_store(self) -> str:
        """What people call it, if it shows an object store as a folder; empty if not."""
        subtype = self.kind.partition("fuse.")[2]
        return _OBJECT_STORES.get(subtype, "") or (_OBJECT_STORES.get(self.source, "") if self.kind == "fuse" else "")

    @property
    def visible_after_seconds(self) -> float:
        """Until when another node sees a new name or size at the latest; 0 where it does at once."""
        return _LATE_SECONDS if self.kind.partition(".")[0] in _LATE else 0.0

    def describe(self) -> str:
        """For people: what it is, and what follows from that."""
        if self.kind in _COHERENT:
            return f"{self.kind} at {self.mount}: nodes see each other's files at once"
        if self.visible_after_seconds:
            return f"{self.kind} at {self.mount}: other nodes may see a new name a minute late; readers wait"
        if self.kind == "tmpfs":
            return f"tmpfs at {self.mount}: memory of this machine, gone with it"
        return f"{self.kind} at {self.mount}: for processes of this machine alone"


def file_system(path: Path, mounts: str | None = None) -> FileSystem:
    """What `path` (it need not exist) lies on. `mounts` stands for /proc/self/mountinfo."""
    found = FileSystem("unknown", "", Path("/"))
    resolved = path.absolute()
    with suppress(OSError):  # it is asked for on the way of every read: what is wrong there shows when it is read
        resolved = resolved.resolve()
    for line in (_read_mounts() if mounts is None else mounts).splitlines():
        left, separator, right = line.partition(" - ")
        fields, about = left.split(" "), right.split(" ")
        if not separator or len(fields) < 5 or len(about) < 2:
            continue
        mount = Path(_plain(fields[4]))
        covers = resolved == mount or mount in resolved.parents
        if covers and len(mount.parts) >= len(found.mount.parts):  # of two at one place the later one hides the other
            found = FileSystem(about[0], _plain(about[1]), mount)
    return found


def refuse_object_store(root: Path, mounts: str | None = None) -> None:
    """Raises StorageUnusable, before anything is tried there, for a root that shows an object store as a folder."""
    found = file_system(root, mounts)
    if found.object_store:
        raise StorageUnusable(
            f"{root} cannot hold runs: it is {found.object_store} (mounted at {found.mount}), where files cannot be "
            "renamed, linked or appended to, so that a step could never be published in one piece",
            "use FSx for Lustre, EFS, NFS or a local disk as run.root; models and data may be read from there, and "
            "run.copy_to copies results to s3://",
        )


def _read_mounts() -> str:
    try:
        return _MOUNTS.read_text(errors="replace")
    except OSError:  # no Linux
        return ""


def _plain(text: str) -> str:
    """The kernel writes a space in a name as \\040."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)
