"""Who drives a run: the holder of the highest epoch. Claims are write-once, so two drivers never hold the same one."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argusrl.errors import FencedError
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import publish_file
from argusrl.storage.sealed_json import encode_sealed


@dataclass(frozen=True, slots=True)
class Epoch:
    """One claim to drive a run. Goes into the names of what is not committed yet, and into every actor call."""

    run: RunFolder
    number: int  # from 1
    nonce: str

    def check(self) -> None:
        """Raises FencedError if a higher epoch was claimed: another driver owns the run."""
        newest = newest_epoch(self.run)
        if newest > self.number:
            raise FencedError(
                f"{self.run.path} is driven by epoch {newest} now, this driver holds epoch {self.number}",
                "let the newer driver go on; `argusrl runs show` says where it runs",
            )


def claim_epoch(run: RunFolder, info: Mapping[str, Any] | None = None) -> Epoch:
    """Claim the next free epoch. Its record holds host, pid, time, nonce and `info`. Raises StorageError."""
    nonce = secrets.token_hex(16)
    number = newest_epoch(run) + 1
    while True:
        record = {
            "epoch": number,
            "nonce": nonce,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            **(info or {}),
        }
        try:
            publish_file(run.epoch(number), encode_sealed(record))
        except FileExistsError:
            number += 1
        else:
            return Epoch(run, number, nonce)


def newest_epoch(run: RunFolder) -> int:
    """The highest epoch claimed so far, 0 if there is none."""
    return max(numbered(run.epochs, ".json"), default=0)


def numbered(folder: Path, suffix: str = "") -> list[int]:
    """The numbers that name entries of a folder (`0003.json`), ascending; other names are ignored."""
    if not folder.is_dir():
        return []
    names = (path.name for path in folder.iterdir())
    return sorted(int(name.removesuffix(suffix)) for name in names if _is_number(name, suffix))


def _is_number(name: str, suffix: str) -> bool:
    return name.endswith(suffix) and name.removesuffix(suffix).isdecimal() and name.isascii()
