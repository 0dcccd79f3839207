import hashlib

import pytest

from argusrl.errors import CorruptionError
from argusrl.storage.digests import LogicalDigest, logical_digest, sha256_bytes, sha256_file

ENTRIES = [("a", "F32", (2, 3), bytes(24)), ("b", "F32", (), b"\x01\x02\x03\x04")]


def test_files_and_bytes_agree(tmp_path):
    data = b"x" * ((1 << 20) + 5)
    (tmp_path / "f").write_bytes(data)
    assert sha256_file(tmp_path / "f") == sha256_bytes(data) == hashlib.sha256(data).hexdigest()
    with pytest.raises(CorruptionError, match="missing"):
        sha256_file(tmp_path / "g")


def test_the_logical_digest_is_this_exact_sum():
    def part(data):
        return len(data).to_bytes(8, "little") + data

    axes = (2).to_bytes(8, "little") + (3).to_bytes(8, "little")
    expected = part(b"a") + part(b"F32") + part(axes) + part(bytes(24))
    expected += part(b"b") + part(b"F32") + part(b"") + part(b"\x01\x02\x03\x04")
    assert logical_digest(ENTRIES) == hashlib.sha256(expected).hexdigest()


def test_order_of_gathering_does_not_matter():
    assert logical_digest(reversed(ENTRIES)) == logical_digest(ENTRIES)


@pytest.mark.parametrize(
    "changed",
    [
        ("c", "F32", (2, 3), bytes(24)),
        ("a", "I32", (2, 3), bytes(24)),
        ("a", "F32", (3, 2), bytes(24)),
        ("a", "F32", (2, 3), bytes(23) + b"\x01"),
    ],
)
def test_name_dtype_shape_and_bytes_all_count(changed):
    assert logical_digest([changed, ENTRIES[1]]) != logical_digest(ENTRIES)


def test_repeated_or_unordered_names_are_refused():
    with pytest.raises(ValueError, match="ascend"):
        logical_digest([ENTRIES[0], ENTRIES[0]])
    digest = LogicalDigest()
    digest.add("b", "F32", (), b"")
    with pytest.raises(ValueError, match="ascend"):
        digest.add("a", "F32", (), b"")


def test_views_of_arrays_are_taken_as_their_bytes():
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(6, dtype="<f4").reshape(2, 3)
    assert logical_digest([("a", "F32", (2, 3), memoryview(array))]) == logical_digest(
        [("a", "F32", (2, 3), array.tobytes())]
    )
