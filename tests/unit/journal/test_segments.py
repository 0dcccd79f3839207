import errno
import hashlib
import os

import msgspec
import pytest

from argusrl.errors import CorruptionError, StorageError
from argusrl.journal.segments import SegmentHeader, SegmentWriter, read_header, read_record, read_segment

HEADER = SegmentHeader(kind="trajectories", step=4, epoch=2, writer="w0")
PAYLOADS = [b"first", b"", b"x" * 1000, b"last"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trajectories" / "000004" / "w0.e0002.seg"


def write(path, payloads=PAYLOADS):
    writer = SegmentWriter(path, HEADER)
    return writer, [writer.append(payload) for payload in payloads]


def payloads(path, require_sealed=True):
    return [payload for _, payload in read_segment(path, require_sealed=require_sealed)]


def test_sealed_records_come_back_by_scan_and_by_place(path):
    writer, places = write(path)
    sealed = writer.seal()
    assert list(read_segment(path, require_sealed=True)) == list(zip(places, PAYLOADS, strict=True))
    assert [read_record(path, place.offset, place.length) for place in places] == PAYLOADS
    assert read_header(path) == HEADER
    data = path.read_bytes()
    assert (sealed.bytes, sealed.records) == (len(data), 4)
    assert sealed.sha256 == hashlib.sha256(data).hexdigest()


def test_an_empty_segment_is_a_segment(path):
    writer, _ = write(path, [])
    assert writer.seal().records == 0
    assert payloads(path) == []


def test_sealing_again_gives_the_same_and_appending_fails(path):
    writer, _ = write(path)
    assert writer.seal() == writer.seal()
    with pytest.raises(ValueError, match="is sealed"):
        writer.append(b"more")
    writer.abandon()
    assert payloads(path) == PAYLOADS


def test_a_writer_never_appends_to_what_it_did_not_create(path):
    writer, _ = write(path)
    writer.seal()
    with pytest.raises(FileExistsError):
        SegmentWriter(path, HEADER)
    assert payloads(path) == PAYLOADS


def test_an_unsealed_segment_reads_but_is_not_sealed(path):
    writer, _ = write(path)
    writer.sync()
    assert payloads(path, require_sealed=False) == PAYLOADS
    with pytest.raises(CorruptionError, match="not sealed"):
        payloads(path)
    writer.abandon()
    assert payloads(path, require_sealed=False) == PAYLOADS
    with pytest.raises(StorageError):
        writer.append(b"x")


def test_a_bad_frame_in_a_sealed_segment_names_path_and_offset(path):
    writer, places = write(path)
    writer.seal()
    data = bytearray(path.read_bytes())
    data[places[2].offset + 50] ^= 1
    path.write_bytes(data)
    for require_sealed in (True, False):
        with pytest.raises(CorruptionError, match=f"{path}.*byte {places[2].offset}"):
            payloads(path, require_sealed)
    assert read_record(path, places[1].offset, places[1].length) == b""
    with pytest.raises(CorruptionError):
        read_record(path, places[2].offset, places[2].length)


@pytest.mark.parametrize(("shift", "stretch"), [(1, 0), (0, 1), (0, -1), (10_000, 0)])
def test_a_wrong_place_is_never_read(path, shift, stretch):
    writer, places = write(path)
    writer.seal()
    with pytest.raises(CorruptionError):
        read_record(path, places[0].offset + shift, places[0].length + stretch)


def test_bytes_after_the_footer_are_corruption(path):
    writer, _ = write(path)
    writer.seal()
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CorruptionError):
        payloads(path)


def test_two_segments_glued_together_are_corruption(path, tmp_path):
    writer, _ = write(path)
    writer.seal()
    other = tmp_path / "other.seg"
    other.write_bytes(path.read_bytes() * 2)
    with pytest.raises(CorruptionError, match="goes on after its footer"):
        payloads(other)


def test_a_record_cut_out_whole_is_corruption(path):
    writer, places = write(path)
    writer.seal()
    data = path.read_bytes()
    path.write_bytes(data[: places[2].offset] + data[places[3].offset :])
    with pytest.raises(CorruptionError, match="does not match the 3 records"):
        payloads(path)


def test_a_missing_segment_is_corruption(path):
    with pytest.raises(CorruptionError, match="missing"):
        payloads(path)


def test_a_newer_format_is_refused(path):
    SegmentWriter(path, msgspec.structs.replace(HEADER, format=2)).seal()
    with pytest.raises(StorageError, match="format 2"):
        payloads(path)


@pytest.mark.parametrize("action", ["sync", "seal"])
def test_a_failed_fsync_is_never_acknowledged(path, monkeypatch, action):
    writer, _ = write(path)

    def fail(_):
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(StorageError, match="injected"):
            getattr(writer, action)()
    for later in (writer.sync, writer.seal, lambda: writer.append(b"x")):
        with pytest.raises(StorageError, match="injected"):
            later()


def test_a_full_disk_keeps_what_was_written_before(path, monkeypatch):
    writer, _ = write(path)
    write_bytes = os.write

    def full(descriptor, data):
        if len(data) > 7:
            return write_bytes(descriptor, data[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError, match="No space left") as caught:
            writer.append(b"y" * 10)
    assert "resumes" in caught.value.hint
    with pytest.raises(StorageError):
        writer.seal()
    assert payloads(path, require_sealed=False) == PAYLOADS


def test_sync_costs_nothing_twice(path, monkeypatch):
    writer, _ = write(path)
    calls = []
    monkeypatch.setattr(os, "fsync", calls.append)
    writer.sync()
    writer.sync()
    assert len(calls) == 1
