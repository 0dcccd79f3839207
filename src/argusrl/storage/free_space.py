"""How much may be written below a folder. On Lustre one full target (OST) refuses writes while df shows terabytes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_LFS_SECONDS = 5.0  # `lfs df` hangs where a target does not answer
_PLENTY_BYTES = 64 << 20
_TARGET = re.compile(r"^(?P<name>\S+)\s+\d+\s+\d+\s+(?P<free_kib>\d+)\s+\d+%\s+\S*\[OST:\d+\S*\]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Bytes that may be written."""

    total_bytes: int  # of the file system as a whole, as df counts them
    target: str = ""  # Lustre: its fullest OST
    target_bytes: int = 0  # free on it

    @property
    def bytes(self) -> int:
        """Free for certain: a file lies on one target, and nobody chooses which."""
        return min(self.total_bytes, self.target_bytes) if self.target else self.total_bytes

    def describe(self) -> str:
        """For people."""
        if self.target and self.target_bytes < self.total_bytes:
            whole = f"the file system as a whole has {byte_text(self.total_bytes)}"
            return f"{byte_text(self.bytes)} of free space on OST {self.target} ({whole})"
        return f"{byte_text(self.bytes)} of free space"


def free_space(path: Path) -> FreeSpace:
    """Asks the file system, and `lfs df` where there is one. Raises OSError."""
    total = shutil.disk_usage(path).free
    targets = _targets(path)
    if not targets:
        return FreeSpace(total)
    name, free = min(targets.items(), key=lambda item: item[1])
    return FreeSpace(total, name, free)


def why_full(path: Path) -> str:
    """What "no space left" at `path` comes from where df does not show it; empty where it does."""
    folder = next((parent for parent in (path, *path.parents) if parent.is_dir()), None)
    if folder is None:
        return ""
    try:
        space, inodes = free_space(folder), os.statvfs(folder)
    except OSError:
        return ""
    if inodes.f_files and not inodes.f_favail:
        return "it has no free inode left: too many files"
    if space.total_bytes < _PLENTY_BYTES:
        return ""
    if space.target and space.target_bytes < _PLENTY_BYTES:
        return f"df shows {byte_text(space.total_bytes)} free, but OST {space.target} is full: see `lfs df`"
    return f"df shows {byte_text(space.total_bytes)} free: is a quota reached, or an OST of Lustre full (`lfs df`)?"


def byte_text(count: float) -> str:
    """A number of bytes for people, in three digits: 5.24 MiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if count < 999.5:
            break
        count, unit = count / 1024, larger
    return f"{count:.3g} {unit}"


def _targets(path: Path) -> dict[str, int]:
    """Free bytes of every OST; nothing where this is no Lustre, or it does not answer."""
    program = shutil.which("lfs")
    if program is None:
        return {}
    try:
        answer = subprocess.run(
            [program, "df", str(path)], capture_output=True, text=True, timeout=_LFS_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {match["name"]: 1024 * int(match["free_kib"]) for match in _TARGET.finditer(answer.stdout)}
