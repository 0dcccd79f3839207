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
from argusrl.storage.files import exists, list_folder
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import publish_file
from argusrl.storage.sealed_json import encode_sealed, read_sealed


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
            raise _fenced(self, newest)


def claim_epoch(run: RunFolder, info: Mapping[str, Any] | None = None) -> Epoch:
    """Claim the next free epoch. Its record holds host, pid, time, nonce and `info`. Raises StorageError."""
    number = newest_epoch(run) + 1
    while True:
        try:
            return _claim(run, number, info)
        except FileExistsError:
            number += 1


def renew_epoch(epoch: Epoch, info: Mapping[str, Any] | None = None) -> Epoch:
    """The epoch after `epoch`, for its own holder: what a driver claims to heal itself.

    Raises FencedError if anybody claimed since: a driver that lost its run must not take it back. Raises StorageError.
    """
    number = epoch.number
    while epoch.run.epoch(number + 1).exists() and _renews(epoch, number + 1):
        number += 1  # a try of before, whose name is there although storage said that it failed
    if newest_epoch(epoch.run) > number:
        raise _fenced(epoch, newest_epoch(epoch.run))
    try:
        return _claim(epoch.run, number + 1, {**(info or {}), "renews": epoch.nonce})
    except FileExistsError:
        raise _fenced(epoch, number + 1) from None


def fence(run: RunFolder, above: int, mark: Mapping[str, Any]) -> int:
    """Claim an epoch above `above` that no driver holds, once for `mark`; its number. Raises StorageError.

    Whoever calls it with the same `above` and `mark` finds the epoch of the first caller, also after other drivers
    claimed theirs: so a late repetition fences nobody who came after the first one.
    """
    number = above + 1
    while True:
        path = run.epoch(number)
        if exists(path):
            record = read_sealed(path)
            if all(record.get(name) == value for name, value in mark.items()):
                return number
        elif number > newest_epoch(run):  # a number below it is a gap that a power loss left: no fence
            try:
                return _claim(run, number, mark).number
            except FileExistsError:
                continue
        number += 1


def _renews(epoch: Epoch, number: int) -> bool:
    return bool(read_sealed(epoch.run.epoch(number)).get("renews") == epoch.nonce)


def _claim(run: RunFolder, number: int, info: Mapping[str, Any] | None) -> Epoch:
    nonce = secrets.token_hex(16)
    record = {
        "epoch": number,
        "nonce": nonce,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        **(info or {}),
    }
    publish_file(run.epoch(number), encode_sealed(record))
    return Epoch(run, number, nonce)


def _fenced(epoch: Epoch, newest: int) -> FencedError:
    return FencedError(
        f"{epoch.run.path} is driven by epoch {newest} now, this driver holds epoch {epoch.number}",
        "let the newer driver go on; `argusrl runs show` says where it runs",
    )


def newest_epoch(run: RunFolder) -> int:
    """The highest epoch claimed so far, 0 if there is none."""
    return max(numbered(run.epochs, ".json"), default=0)


def numbered(folder: Path, suffix: str = "") -> list[int]:
    """The numbers that name entries of a folder (`0003.json`), ascending; other names are ignored."""
    names = (path.name for path in list_folder(folder))
    return sorted(int(name.removesuffix(suffix)) for name in names if _is_number(name, suffix))


def _is_number(name: str, suffix: str) -> bool:
    return name.endswith(suffix) and name.removesuffix(suffix).isdecimal() and name.isascii()
