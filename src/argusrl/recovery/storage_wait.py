"""Waits for a run folder that went away or filled up: the run pauses and keeps everything instead of ending."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress

from argusrl.errors import StorageError, StorageUnusable
from argusrl.journal.epochs import numbered
from argusrl.storage.digests import sha256_file
from argusrl.storage.free_space import byte_text, free_space
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import fsync_path, storage_error, temporary_name, write_all

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


async def await_storage(
    folder: RunFolder,
    expected_head_sha256: str,
    *,
    deadline_seconds: float,
    needed_bytes: int = 0,
    say: Callable[[str], None],
) -> float:
    """Wait until `storage_problem` finds none; the seconds that took.

    `say` gets the reason when it appears or changes. Raises StorageUnusable after the deadline.
    """
    begin, pause, said = time.monotonic(), _FIRST_PAUSE_SECONDS, ""
    while True:
        # In a thread: a network mount that hangs must not hang the loop, which has heartbeats to send.
        problem = await asyncio.to_thread(storage_problem, folder, expected_head_sha256, needed_bytes)
        waited = time.monotonic() - begin
        if problem is None:
            return waited
        if waited >= deadline_seconds:
            raise StorageUnusable(
                f"{problem}; waited {waited:.0f} s",
                "mend it and run the same command again: it resumes (recovery.storage_wait_seconds is the limit)",
            )
        if problem != said:
            say(f"Waiting for the run folder: {problem}")
            said = problem
        await asyncio.sleep(min(pause, deadline_seconds - waited))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def storage_problem(folder: RunFolder, expected_head_sha256: str, needed_bytes: int = 0) -> str | None:
    """Why `folder` cannot be gone on with right now, None if it can. Creates nothing where the folder is missing.

    It must hold its config and the commit with that digest ("" for a run without commits): an empty folder in its
    place is an unmounted root, and writing there would begin a second history.
    """
    if not folder.config.exists():
        return f"{folder.path} is not there"
    if expected_head_sha256 and not _holds(folder, expected_head_sha256):
        return f"{folder.commits} does not hold the last commit of this run"
    return free_space_problem(folder, needed_bytes) or write_problem(folder)


def free_space_problem(folder: RunFolder, needed_bytes: int) -> str | None:
    """Why a step that writes `needed_bytes` should not begin; None if there is room."""
    try:
        free = free_space(folder.path)
    except OSError as error:
        return storage_error(error, folder.path).message
    if free.bytes >= needed_bytes:
        return None
    return f"{folder.path} has {free.describe()}, {byte_text(needed_bytes)} are needed"


def write_problem(folder: RunFolder) -> str | None:
    """Why nothing can be published in `folder`; None if a small file could be written, made durable and linked."""
    file = temporary_name(folder.path / "probe")
    linked = temporary_name(folder.path / "probe")
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            write_all(descriptor, bytes(4096))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.link(file, linked)
        fsync_path(folder.path)
    except OSError as error:
        return storage_error(error, folder.path).message
    finally:
        for path in (file, linked):
            with suppress(OSError):
                path.unlink()
    return None


def _holds(folder: RunFolder, sha256: str) -> bool:
    # Newest first: it is the one, or another driver committed a few more, which is for the fence to see.
    with suppress(StorageError, OSError):
        return any(sha256_file(folder.commit(step)) == sha256 for step in reversed(numbered(folder.commits, ".json")))
    return False
