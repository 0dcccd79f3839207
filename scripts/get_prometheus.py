"""Get Prometheus for the tests: the one on PATH, or Debian's package unpacked below .venv. Needs no root.

    python scripts/get_prometheus.py             # prints the folder with prometheus and promtool

Nothing is installed: apt downloads the package (with lists of its own where the system has none), dpkg unpacks it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".venv" / "services" / "prometheus"
_NAMES = ("prometheus", "promtool")
_APT_SECONDS = 120


def prometheus_folder() -> Path:
    """The folder with both programs. Raises LookupError that says why they cannot be had."""
    on_path = shutil.which("prometheus")
    unpacked = FOLDER / "usr" / "bin"
    for folder in (Path(on_path).parent if on_path else unpacked, unpacked):
        if all(os.access(folder / name, os.X_OK) for name in _NAMES):
            return folder
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise LookupError(f"no prometheus on PATH, and no {program} to get Debian's: install Prometheus")
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
        package = _download(Path(scratch))
        _run(["dpkg", "-x", str(package), f"{scratch}/unpacked"])
        shutil.rmtree(FOLDER, ignore_errors=True)
        os.rename(f"{scratch}/unpacked", FOLDER)
    return unpacked


def _download(folder: Path) -> Path:
    """The package file, by the system's package lists or by fresh ones of this folder."""
    (folder / "state" / "lists" / "partial").mkdir(parents=True)
    (folder / "cache" / "archives" / "partial").mkdir(parents=True)
    own = ["-o", f"Dir::State={folder}/state", "-o", f"Dir::Cache={folder}/cache"]
    own += ["-o", "Dir::State::status=/var/lib/dpkg/status", "-o", "APT::Sandbox::User="]
    download = ["download", "prometheus"]
    try:
        _run(["apt-get", "-q", "-o", "APT::Sandbox::User=", *download], folder)
    except LookupError:
        _run(["apt-get", "-q", *own, "update"], folder)
        _run(["apt-get", "-q", *own, *download], folder)
    return next(folder.glob("prometheus_*.deb"))


def _run(words: list[str], folder: Path | None = None) -> None:
    try:
        subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True, timeout=_APT_SECONDS)
    except subprocess.CalledProcessError as error:
        raise LookupError(f"{words[0]} failed: {(error.stderr or error.stdout).strip()}") from error
    except subprocess.TimeoutExpired:
        raise LookupError(
            f"{' '.join(words[:1])} did not end in {_APT_SECONDS} s: are Debian's mirrors in reach?"
        ) from None


if __name__ == "__main__":
    try:
        print(prometheus_folder())
    except LookupError as error:
        sys.exit(str(error))
