"""Attempts: one start of a driver by the supervisor. Why it ended (write-once), and until when it lived."""

from __future__ import annotations

from typing import Any

import msgspec

from argusrl.errors import CorruptionError
from argusrl.journal.epochs import numbered
from argusrl.storage.files import exists, read_file
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import make_folder, publish_file, replace_file, storage_faults
from argusrl.storage.sealed_json import encode_sealed, read_sealed


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Why an attempt ended."""

    outcome: str  # "complete" | "interrupted" | "failed" | "killed" | …: a word for people and for the supervisor
    exit_code: int
    reason: str  # one sentence
    error: str = ""  # class of the exception, if there was one
    step: int | None = None  # last committed step
    time: float = 0.0  # seconds since 1970
    details: dict[str, Any] = {}

    @property
    def complete(self) -> bool:
        """Whether the run reached its end."""
        return self.outcome == "complete"


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver was doing when it last wrote this."""

    time: float  # seconds since 1970
    pid: int
    host: str
    epoch: int
    step: int
    phase: str  # "rollout" | "train" | …


def next_attempt(run: RunFolder) -> int:
    """Claim the next attempt: creates its folder (and logs/ in it). Raises StorageError."""
    make_folder(run.attempts)
    number = max(numbered(run.attempts), default=0) + 1
    while True:
        folder = run.attempt(number)
        try:
            with storage_faults(folder):
                folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            make_folder(folder / "logs")
            return number


def newest_attempt(run: RunFolder) -> int:
    """The number of the newest attempt, 0 if there is none."""
    return max(numbered(run.attempts), default=0)


def write_verdict(run: RunFolder, attempt: int, verdict: Verdict) -> Verdict:
    """Write the verdict once; if there is one already, that one stands and is returned. Raises StorageError."""
    try:
        publish_file(run.attempt(attempt) / "verdict.json", encode_sealed(msgspec.to_builtins(verdict)))
    except FileExistsError:
        return read_verdict(run, attempt) or verdict
    return verdict


def read_verdict(run: RunFolder, attempt: int) -> Verdict | None:
    """None while the attempt has no verdict; of a damaged one there is left that the attempt has ended."""
    try:
        return checked_verdict(run, attempt)
    except CorruptionError as error:
        return Verdict(outcome="killed", exit_code=1, reason=f"how it ended is lost: {error.message}")


def checked_verdict(run: RunFolder, attempt: int) -> Verdict | None:
    """None while the attempt has no verdict. Raises CorruptionError if it is damaged."""
    path = run.attempt(attempt) / "verdict.json"
    if not exists(path):
        return None
    try:
        return msgspec.convert(read_sealed(path), Verdict)
    except msgspec.ValidationError as error:
        raise CorruptionError(f"{path} is not a verdict: {error}") from error


def write_heartbeat(run: RunFolder, attempt: int, heartbeat: Heartbeat) -> None:
    """Replace the attempt's heartbeat. Raises StorageError."""
    replace_file(run.attempt(attempt) / "heartbeat.json", msgspec.json.encode(heartbeat) + b"\n")


def read_heartbeat(run: RunFolder, attempt: int) -> Heartbeat | None:
    """None before the first one, and where it is damaged: the next one will not be."""
    try:
        return msgspec.json.decode(read_file(run.attempt(attempt) / "heartbeat.json"), type=Heartbeat)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
