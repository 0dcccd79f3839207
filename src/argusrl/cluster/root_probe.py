"""What a pod can do in a run root, and what is installed in it, as one line of JSON.

python -m argusrl.cluster.root_probe /fsx/argusrl/runs
"""

from __future__ import annotations

import json
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from argusrl.errors import StorageError
from argusrl.storage.probe import probe_root


def look(root: Path) -> dict[str, Any]:
    """Versions, clock, and the result of `probe_root`; error and hint where it failed."""
    seen: dict[str, Any] = {
        "root": str(root),
        "python": platform.python_version(),
        "ray": _version("ray"),
        "argusrl": _version("argusrl"),
    }
    try:
        probe = probe_root(root)
    except StorageError as error:
        seen |= {"error": error.message, "hint": error.hint}
    else:
        seen |= {
            "file_system": probe.file_system.kind,
            "free_bytes": probe.free.bytes,
            "fsync_seconds": probe.fsync_seconds,
            "write_bytes_per_second": probe.write_bytes_per_second,
        }
    return {**seen, "time": time.time()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


if __name__ == "__main__":
    print(json.dumps(look(Path(sys.argv[1]))))
