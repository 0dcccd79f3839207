"""Digests. All are SHA-256 in lower-case hex."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from argusrl.errors import CorruptionError, StorageError

_CHUNK_BYTES = 1 << 20


def sha256_bytes(data: bytes | memoryview) -> str:
    """Digest of bytes in memory."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Digest of a file, streamed. Raises CorruptionError if it is missing, StorageError if it cannot be read."""
    try:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except FileNotFoundError:
        raise CorruptionError(f"{path} is missing") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", "may this user read it?") from error
    return digest.hexdigest()


class LogicalDigest:
    """Digest of named tensors that depends on their names, dtypes, shapes and bytes alone.

    It does not see files, the order they were gathered in, or how they were sharded. SHA-256 over, for each entry in
    ascending order of names: name, dtype, shape (each axis as 8 bytes) and raw bytes, each part prefixed with its
    length in 8 bytes. All integers and all tensor data are little-endian.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._last: str | None = None

    def add(self, name: str, dtype: str, shape: Sequence[int], data: bytes | memoryview) -> None:
        """Add one entry. Raises ValueError unless names come in strictly ascending order."""
        if self._last is not None and name <= self._last:
            raise ValueError(f"names must ascend, got {name!r} after {self._last!r}")
        self._last = name
        axes = b"".join(_eight_bytes(axis) for axis in shape)
        for part in (name.encode(), dtype.encode(), axes, memoryview(data).cast("B")):
            self._digest.update(_eight_bytes(len(part)))
            self._digest.update(part)

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def logical_digest(items: Iterable[tuple[str, str, Sequence[int], bytes | memoryview]]) -> str:
    """LogicalDigest of (name, dtype, shape, little-endian bytes) in any order. Raises ValueError on a repeated name."""
    digest = LogicalDigest()
    for name, dtype, shape, data in sorted(items, key=lambda item: item[0]):
        digest.add(name, dtype, shape, data)
    return digest.hexdigest()


def _eight_bytes(value: int) -> bytes:
    return value.to_bytes(8, "little")
