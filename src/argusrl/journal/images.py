"""Encoded images of a step, packed into one segment per writer, once per content."""

from __future__ import annotations

import hashlib

from argusrl.errors import CorruptionError
from argusrl.journal.records import ImageBytes, ImageIndex, decode_record, encode_record
from argusrl.journal.segments import SealedSegment, SegmentHeader, SegmentWriter, read_record
from argusrl.storage.layout import RunFolder
from argusrl.storage.visibility import await_visible
from argusrl.types import Image, ImageRef


class ImageWriter:
    """Adds images to `images/<step>/<writer>.e<epoch>.seg`, which is created with the first one."""

    def __init__(self, run: RunFolder, step: int, epoch: int, writer: str) -> None:
        self._run = run
        self._path = run.image_segment(step, writer, epoch)
        self._header = SegmentHeader(kind="images", step=step, epoch=epoch, writer=writer)
        self._segment: SegmentWriter | None = None
        self._refs: dict[str, ImageRef] = {}
        self._sealed = False

    def add(self, image: Image) -> ImageRef:
        """Write the image unless its content is there already. Raises StorageError."""
        sha256 = image.sha256
        if sha256 not in self._refs:
            if self._segment is None:
                self._segment = SegmentWriter(self._path, self._header)
            record = ImageBytes(sha256=sha256, width=image.width, height=image.height, data=image.data)
            location = self._segment.append(encode_record(record))
            self._refs[sha256] = ImageRef(
                sha256=sha256,
                segment=self._run.relative(self._path),
                offset=location.offset,
                length=location.length,
                width=image.width,
                height=image.height,
            )
        return self._refs[sha256]

    def find(self, sha256: str) -> ImageRef | None:
        """Where this writer put that content, if it has it."""
        return self._refs.get(sha256)

    def sync(self) -> None:
        """Make all images durable. Raises StorageError."""
        if self._segment is not None:
            self._segment.sync()

    def seal(self) -> SealedSegment | None:
        """Write the index and seal; None if there was no image. May be repeated. Raises StorageError."""
        if self._segment is None:
            return None
        if not self._sealed:
            self._segment.append(encode_record(ImageIndex(images=tuple(self._refs.values()))))
            self._sealed = True
        return self._segment.seal()

    def abandon(self) -> None:
        """Close without sealing."""
        if self._segment is not None:
            self._segment.abandon()


def read_image(run: RunFolder, ref: ImageRef) -> bytes:
    """The encoded bytes. Raises CorruptionError if they are not the ones `ref` names."""
    path = run.absolute(ref.segment)
    await_visible(path, ref.offset + ref.length)
    record = decode_record(read_record(path, ref.offset, ref.length))
    if not isinstance(record, ImageBytes) or hashlib.sha256(record.data).hexdigest() != ref.sha256:
        raise CorruptionError(f"{path} does not hold image {ref.sha256} at byte {ref.offset}")
    return record.data
