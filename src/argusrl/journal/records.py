"""What the journal's segments hold: versioned records, encoded as MessagePack.

Trajectory segments hold `started`, `turn`, `partial`, `finished` and `failed`; image segments `image` and one `index`.
Free-form fields (info, answer, environment) must be JSON-like: what comes back has lists for tuples.
"""

from __future__ import annotations

from typing import Any

import msgspec

from argusrl.errors import CorruptionError, DataError, StorageError
from argusrl.types import EpisodeFailure, ImageRef, Trajectory, TrajectoryKey, Turn

RECORD_VERSION = 1  # of every kind below; a reader refuses higher ones


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """An attempt of an episode begins. Durable before its first request."""

    key: TrajectoryKey
    attempt: int  # of this episode, from 0
    seed: int
    adapter_version: int
    adapter_sha256: str
    environment: dict[str, Any]  # what is needed to make the same environment again
    version: int = RECORD_VERSION


class TurnDone(msgspec.Struct, frozen=True, kw_only=True, tag="turn"):
    """One turn of an unfinished episode is complete, its action known."""

    key: TrajectoryKey
    attempt: int
    index: int  # of the turn, from 0
    turn: Turn
    version: int = RECORD_VERSION


class Partial(msgspec.Struct, frozen=True, kw_only=True, tag="partial"):
    """A span of a reply that is still being sampled; spans of a turn follow each other."""

    key: TrajectoryKey
    attempt: int = 0
    turn: int  # index of the turn the span belongs to
    offset: int  # tokens of the reply before this span
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # as many as ids
    adapter_version: int
    adapter_sha256: str
    place: str = ""  # digest of all tokens and images before the reply, so that it is continued there alone
    version: int = RECORD_VERSION


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """An episode that counts."""

    trajectory: Trajectory
    image_patches: int  # vision patches before merging, of all turns
    version: int = RECORD_VERSION


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """An attempt that counts for nothing, and why."""

    failure: EpisodeFailure
    attempt: int
    version: int = RECORD_VERSION


class ImageBytes(msgspec.Struct, frozen=True, kw_only=True, tag="image"):
    """One encoded image."""

    sha256: str
    width: int
    height: int
    data: bytes
    version: int = RECORD_VERSION


class ImageIndex(msgspec.Struct, frozen=True, kw_only=True, tag="index"):
    """All images of a segment; its last record."""

    images: tuple[ImageRef, ...]
    version: int = RECORD_VERSION


Record = Started | TurnDone | Partial | Finished | Failed | ImageBytes | ImageIndex


class _Version(msgspec.Struct):
    version: int


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy and torch scalars and arrays, without importing either
        return value.tolist()
    raise DataError(
        f"an episode carries a {type(value).__module__}.{type(value).__qualname__}, which cannot be journalled",
        "put only numbers, text, booleans, lists and dictionaries into info, answer and options",
    )


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    """MessagePack of one record. Raises DataError if a free-form field holds what cannot be journalled."""
    try:
        return _encoder.encode(record)
    except (OverflowError, ValueError, TypeError) as error:  # integers beyond 64 bits, lone surrogates, odd keys
        raise DataError(
            f"a {record.__struct_config__.tag} record cannot be journalled: {error}",
            "put only numbers (integers of 64 bits), text, booleans, lists and dictionaries into info and answer",
        ) from error


def decode_record(payload: bytes) -> Record:
    """Raises CorruptionError if the payload is no record, StorageError if a newer argusrl wrote it."""
    try:
        record = _decoder.decode(payload)
    except msgspec.DecodeError as error:
        if (version := _version(payload)) > RECORD_VERSION:
            raise _newer(version) from error
        raise CorruptionError(f"a record of {len(payload)} bytes does not decode: {error}") from error
    if record.version > RECORD_VERSION:
        raise _newer(record.version)
    return record


def _version(payload: bytes) -> int:
    try:
        return msgspec.msgpack.decode(payload, type=_Version).version
    except msgspec.DecodeError:
        return 0


def _newer(version: int) -> StorageError:
    return StorageError(
        f"the journal holds records of version {version}, this argusrl reads up to {RECORD_VERSION}",
        "use the argusrl that wrote the run, or a newer one",
    )
