import json
import math

import pytest

from argusrl.errors import CorruptionError
from argusrl.storage.sealed_json import decode_sealed, encode_sealed, read_sealed


def test_what_was_written_comes_back_without_its_seal(tmp_path):
    fields = {"a": 1, "b": [1.5, None, True], "c": {"x": "é"}}
    (tmp_path / "f.json").write_bytes(encode_sealed(fields))
    assert read_sealed(tmp_path / "f.json") == fields
    assert list(json.loads((tmp_path / "f.json").read_bytes()))[-1] == "seal"


def test_every_flipped_bit_and_every_truncation_is_noticed(tmp_path):
    data = encode_sealed({"sha256": "ab", "number": 10, "nested": {"list": [1, 2]}})
    for index in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[index] ^= 1 << bit
            with pytest.raises(CorruptionError, match="damaged"):
                decode_sealed(bytes(flipped), tmp_path)
        with pytest.raises(CorruptionError):
            decode_sealed(data[:index], tmp_path)


def test_a_missing_file_is_corruption(tmp_path):
    with pytest.raises(CorruptionError, match="missing"):
        read_sealed(tmp_path / "none.json")


def test_numbers_json_has_no_word_for_become_strings(tmp_path):
    fields = decode_sealed(encode_sealed({"a": (math.nan, math.inf, -math.inf)}), tmp_path)
    assert fields == {"a": ["NaN", "Infinity", "-Infinity"]}


def test_array_scalars_become_numbers(tmp_path):
    numpy = pytest.importorskip("numpy")
    fields = {"x": numpy.float32(0.5), "y": numpy.arange(2), "z": numpy.float64("nan")}
    assert decode_sealed(encode_sealed(fields), tmp_path) == {"x": 0.5, "y": [0, 1], "z": "NaN"}


def test_a_sealed_file_is_laid_out_as_json_indents_it():
    fields = {
        "é": [],
        "b": {},
        "c": [1, -0.0, 1e22, 5e-324, 'quote " and \u2028'],
        "d": {"e": [[{"f": None}], True]},
        3: (1,),
    }
    text, _, seal = encode_sealed(fields).rpartition(b",\n")
    assert text + b"\n}" == json.dumps(fields, indent=1).encode()
    assert seal.startswith(b' "seal": ')
