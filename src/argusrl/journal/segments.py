"""Segments: append-only files of framed records. One writer, sealed once, read by many.

Layout, integers little-endian:

    header   frame whose payload is JSON: format, kind, step, epoch, writer
    record   frame, any number of times
    footer   frame: number of records (8 bytes), SHA-256 of every byte before the footer (32 bytes)

    frame    tag (4 bytes: ASEG, AREC or AEND), length of payload (4), CRC-32 of tag, length and payload (4), payload

A segment without its footer is what a dead writer left: whole records up to the first bad frame are good, the rest is
a torn tail. In a sealed segment every byte counts.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from argusrl.errors import CorruptionError, StorageError
from argusrl.storage.publish import fsync_path, make_folder, storage_error, storage_faults, write_all

SEGMENT_FORMAT = 1
_HEADER, _RECORD, _FOOTER = b"ASEG", b"AREC", b"AEND"
_FRAME = struct.Struct("<4sII")
_START = struct.Struct("<4sI")  # the part of a frame that its checksum covers, besides the payload
_COUNT = struct.Struct("<Q32s")
_FOOTER_BYTES = _FRAME.size + _COUNT.size


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote a segment, and for which step."""

    kind: str  # "trajectories" | "images"
    step: int
    epoch: int
    writer: str
    format: int = SEGMENT_FORMAT


@dataclass(frozen=True, slots=True)
class Location:
    """Where one framed record lies in its segment."""

    offset: int  # bytes from the start of the file
    length: int  # bytes of the whole frame


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSegment:
    """A segment that will never change. Commits name these."""

    path: str  # relative to the run folder where a commit or a journal names it
    bytes: int
    records: int
    sha256: str  # of the whole file


class SegmentWriter:
    """Appends to a file it created itself. Methods may be called from several threads.

    After a failed write or fsync the writer refuses everything else: what reached the disk is unknown.
    """

    def __init__(self, path: Path, header: SegmentHeader) -> None:
        """Create the file. Raises FileExistsError if it is there, StorageError if storage fails."""
        self.path = path
        self._lock = threading.Lock()
        self._digest = hashlib.sha256()
        self._end = self._durable = self._records = 0
        self._broken: OSError | None = None
        self._sealed: SealedSegment | None = None
        make_folder(path.parent)
        with storage_faults(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            fsync_path(path.parent)
        self._write(_frame(_HEADER, msgspec.json.encode(header)))

    def append(self, payload: bytes) -> Location:
        """Add a record; durable after the next sync or seal. Raises StorageError."""
        with self._lock:
            location = self._write(_frame(_RECORD, payload))
            self._records += 1
            return location

    def sync(self) -> None:
        """Make everything appended so far durable; cheap if it is already. Raises StorageError."""
        with self._lock:
            self._sync()

    def seal(self) -> SealedSegment:
        """Write the footer, make all durable, close. May be repeated. Raises StorageError."""
        with self._lock:
            if self._sealed is None:
                self._write(_frame(_FOOTER, _COUNT.pack(self._records, self._digest.digest())))
                self._sync()
                os.close(self._descriptor)
                self._sealed = SealedSegment(
                    path=str(self.path), bytes=self._end, records=self._records, sha256=self._digest.hexdigest()
                )
            return self._sealed

    def abandon(self) -> None:
        """Close without a footer: what was written stays as a torn segment. Nothing to do once sealed or broken."""
        with self._lock:
            if self._sealed is None and self._broken is None:
                self._fail(OSError(errno.EBADF, "the writer was abandoned"))

    def _write(self, frame: bytes) -> Location:
        self._check_usable()
        try:
            write_all(self._descriptor, frame)
        except OSError as error:
            raise self._fail(error) from error
        self._digest.update(frame)
        location = Location(self._end, len(frame))
        self._end += len(frame)
        return location

    def _sync(self) -> None:
        if self._durable == self._end:
            return
        self._check_usable()
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._fail(error) from error
        self._durable = self._end

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise storage_error(self._broken, self.path)
        if self._sealed is not None:
            raise ValueError(f"{self.path} is sealed")

    def _fail(self, error: OSError) -> StorageError:
        self._broken = error
        with suppress(OSError):
            os.close(self._descriptor)
        return storage_error(error, self.path)


def read_header(path: Path) -> SegmentHeader:
    """Raises CorruptionError if the header is torn, StorageError if a newer argusrl wrote the segment."""
    with _open(path) as file:
        return _read_header(file, path)


def read_segment(
    path: Path, *, require_sealed: bool, on_torn: Callable[[str], None] | None = None
) -> Iterator[tuple[Location, bytes]]:
    """All records in order, one in memory at a time.

    Raises CorruptionError with path and offset at the first bad byte of a sealed segment, or where `require_sealed`
    meets an unsealed one. An unsealed segment ends at its torn tail, of which only `on_torn` hears.
    """
    with _open(path) as file:
        sealed = _ends_with_footer(file)
        if require_sealed and not sealed:
            raise CorruptionError(f"{path} is not sealed: its footer is missing or damaged")
        digest = hashlib.sha256()
        records = offset = 0
        try:
            _read_header(file, path)
            file.seek(0)
            while (frame := _read_frame(file, path)) is not None:
                tag, payload = frame
                length = _FRAME.size + len(payload)
                if tag == _FOOTER:
                    _check_footer(payload, records, digest.digest(), path, offset)
                    if file.read(1):
                        raise CorruptionError(f"{path} goes on after its footer at byte {offset}")
                    return
                if tag == _RECORD:
                    records += 1
                    yield Location(offset, length), payload
                digest.update(_frame(tag, payload))
                offset += length
            if sealed:
                raise CorruptionError(f"{path} ends at byte {offset} without a footer")
        except CorruptionError as error:
            if sealed:
                raise
            if on_torn is not None:
                on_torn(error.message)


def read_record(path: Path, offset: int, length: int) -> bytes:
    """The payload of one record. Raises CorruptionError if length or checksum do not agree."""
    with _open(path) as file:
        file.seek(offset)
        frame = _read_frame(file, path)
    if frame is None or frame[0] != _RECORD or _FRAME.size + len(frame[1]) != length:
        raise CorruptionError(f"{path} has no record of {length} bytes at byte {offset}")
    return frame[1]


def _frame(tag: bytes, payload: bytes) -> bytes:
    checksum = zlib.crc32(payload, zlib.crc32(_START.pack(tag, len(payload))))
    return _FRAME.pack(tag, len(payload), checksum) + payload


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise CorruptionError(f"{path} is missing") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def _read_frame(file: BinaryIO, path: Path) -> tuple[bytes, bytes] | None:
    """The next frame, None at the end of the file."""
    offset = file.tell()
    head = file.read(_FRAME.size)
    if not head:
        return None
    if len(head) == _FRAME.size:
        tag, length, checksum = _FRAME.unpack(head)
        if tag in (_HEADER, _RECORD, _FOOTER) and length <= os.fstat(file.fileno()).st_size - file.tell():
            payload = file.read(length)
            if zlib.crc32(payload, zlib.crc32(_START.pack(tag, length))) == checksum:
                return tag, payload
    raise CorruptionError(f"{path} is damaged: bad frame at byte {offset}")


def _read_header(file: BinaryIO, path: Path) -> SegmentHeader:
    frame = _read_frame(file, path)
    if frame is None or frame[0] != _HEADER:
        raise CorruptionError(f"{path} is damaged: no header at byte 0")
    try:
        header = msgspec.json.decode(frame[1], type=SegmentHeader)
    except msgspec.DecodeError as error:
        raise CorruptionError(f"{path} is damaged: its header does not decode: {error}") from error
    if header.format > SEGMENT_FORMAT:
        raise StorageError(
            f"{path} has segment format {header.format}, this argusrl reads up to {SEGMENT_FORMAT}",
            "use the argusrl that wrote the run, or a newer one",
        )
    return header


def _ends_with_footer(file: BinaryIO) -> bool:
    size = os.fstat(file.fileno()).st_size
    if size < _FOOTER_BYTES:
        return False
    file.seek(size - _FOOTER_BYTES)
    tag, length, _ = _FRAME.unpack(file.read(_FRAME.size))
    file.seek(0)
    return bool(tag == _FOOTER and length == _COUNT.size)


def _check_footer(payload: bytes, records: int, digest: bytes, path: Path, offset: int) -> None:
    if _COUNT.unpack(payload) != (records, digest):
        raise CorruptionError(f"{path} is damaged: its footer at byte {offset} does not match the {records} records")
