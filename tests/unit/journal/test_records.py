import msgspec
import pytest

from argusrl.errors import CorruptionError, DataError, StorageError
from argusrl.journal.records import (
    Failed,
    Finished,
    ImageBytes,
    ImageIndex,
    Partial,
    Started,
    TurnDone,
    decode_record,
    encode_record,
)
from argusrl.types import AdapterRef, EpisodeEnd, EpisodeFailure, ImageRef, StopReason, TrajectoryKey
from fakes.run_folder import trajectory, turn

KEY = TrajectoryKey(3, "row-7", 1)
ADAPTER = AdapterRef(version=2, epoch=1, path="adapters/v000002.e0001", sha256="ab", file_sha256="cd")
IMAGE = ImageRef(sha256="ef", segment="images/000003/w.e0001.seg", offset=10, length=20, width=4, height=5)
RECORDS = [
    Started(key=KEY, attempt=1, seed=2**64 - 1, adapter_version=2, adapter_sha256="ab", environment={"id": "x"}),
    TurnDone(key=KEY, attempt=0, index=1, turn=turn(ADAPTER, IMAGE)),
    Partial(key=KEY, attempt=0, turn=0, offset=2, ids=(1,), logprobs=(-0.1,), adapter_version=2, adapter_sha256="ab"),
    Finished(trajectory=trajectory(KEY, turn(ADAPTER, IMAGE)), image_patches=16),
    Failed(failure=EpisodeFailure(key=KEY, kind="reward", source="math", message="NaN"), attempt=2),
    ImageBytes(sha256="ef", width=4, height=5, data=b"\x00\xff"),
    ImageIndex(images=(IMAGE,)),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_kind_comes_back_equal(record):
    assert decode_record(encode_record(record)) == record


def test_types_come_back_as_they_were():
    back = decode_record(encode_record(RECORDS[3])).trajectory
    assert back.end is EpisodeEnd.TERMINATED
    assert back.turns[0].stop is StopReason.STOP
    assert isinstance(back.turns[0].prompt_ids, tuple)
    assert back.turns[0].logprobs == RECORDS[3].trajectory.turns[0].logprobs  # float64, bit for bit
    assert back.seed == 2**63 + 1


def test_numpy_in_free_form_fields_becomes_plain():
    numpy = pytest.importorskip("numpy")
    environment = {"a": numpy.float32(0.5), "b": numpy.arange(3), "c": numpy.int64(4)}
    started = msgspec.structs.replace(RECORDS[0], environment=environment)
    assert decode_record(encode_record(started)).environment == {"a": 0.5, "b": [0, 1, 2], "c": 4}


@pytest.mark.parametrize("value", [object(), 2**70, {1, 2}.__iter__()])
def test_what_cannot_be_journalled_is_refused_with_a_hint(value):
    with pytest.raises(DataError) as caught:
        encode_record(msgspec.structs.replace(RECORDS[0], environment={"x": value}))
    assert caught.value.hint


def test_a_newer_record_is_refused_not_guessed():
    newer = msgspec.structs.replace(RECORDS[4], version=2)
    with pytest.raises(StorageError, match="version 2"):
        decode_record(encode_record(newer))
    unknown = msgspec.msgpack.encode({"type": "dream", "version": 9})
    with pytest.raises(StorageError, match="version 9"):
        decode_record(unknown)


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode({"type": "finished", "version": 1})])
def test_nonsense_is_corruption(payload):
    with pytest.raises(CorruptionError):
        decode_record(payload)
