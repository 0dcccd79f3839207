"""Samples that are left out of their step, because they ended it again and again: a write-once record each."""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec

from argusrl.storage.digests import sha256_bytes
from argusrl.storage.files import list_folder
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import publish_file
from argusrl.storage.sealed_json import encode_sealed, read_sealed
from argusrl.types import EpisodeFailure, TrajectoryKey

QUARANTINED = "quarantined"  # kind of the failure that stands for such a sample in its commit


def quarantine(run: RunFolder, key: TrajectoryKey, reason: str) -> EpisodeFailure:
    """Leave a trajectory out of its step from now on. Raises StorageError."""
    failure = EpisodeFailure(key=key, kind=QUARANTINED, source="training", message=reason)
    name = sha256_bytes(f"{key.prompt_id}/{key.sample}".encode())[:16]
    record = {"failure": msgspec.to_builtins(failure), "time": time.time()}
    with suppress(FileExistsError):
        publish_file(run.quarantine / f"{key.step:06d}.{name}.json", encode_sealed(record))
    return failure


def quarantined(run: RunFolder, step: int) -> list[EpisodeFailure]:
    """What is left out of a step. Raises CorruptionError where a record is damaged."""
    paths = [path for path in list_folder(run.quarantine) if path.match(f"{step:06d}.*.json")]
    return [msgspec.convert(read_sealed(path)["failure"], EpisodeFailure) for path in paths]
