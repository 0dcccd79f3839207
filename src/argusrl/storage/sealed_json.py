"""Sealed JSON: readable files that notice any changed byte.

The last key, `seal`, is the SHA-256 of the text without it. A reader encodes what it read again and compares bytes,
so a flip anywhere, white space included, is found. Every write-once JSON file of a run folder is sealed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from argusrl.errors import CorruptionError
from argusrl.storage.files import read_file

SEAL = "seal"
_EMPTY, _END = b"{}\n", b"\n}\n"
_LOST = "restore the file from a copy; `argusrl runs verify` lists everything that is damaged"


def encode_sealed(fields: Mapping[str, Any]) -> bytes:
    """Indented JSON of `fields` and their seal. NaN and infinities become strings, JSON has no word for them."""
    return _sealed(_pretty(fields))


def _sealed(body: bytes) -> bytes:
    seal = f'"{SEAL}": "{hashlib.sha256(body).hexdigest()}"'.encode()
    if body == _EMPTY:
        return b"{\n " + seal + _END
    return body.removesuffix(_END) + b",\n " + seal + _END


def decode_sealed(data: bytes, path: Path) -> dict[str, Any]:
    """The fields without their seal. Raises CorruptionError naming `path` if a byte is not as it was written."""
    try:
        fields = json.loads(data)
        del fields[SEAL]
        intact = _sealed(_pretty(fields)) == data
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise CorruptionError(f"{path} is damaged: its {len(data)} bytes do not match their seal", _LOST)
    return dict(fields)


def read_sealed(path: Path) -> dict[str, Any]:
    """Read and check a sealed file. Raises CorruptionError (missing, damaged) or StorageError."""
    try:
        data = read_file(path)
    except FileNotFoundError:
        raise CorruptionError(f"{path} is missing", _LOST) from None
    return decode_sealed(data, path)


def json_safe(value: Any) -> Any:
    """`value` as JSON can hold it: tuples as lists, arrays as numbers, "NaN", "Infinity" and "-Infinity" as strings."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if hasattr(value, "tolist"):  # NumPy and torch scalars and arrays, without importing either
        return json_safe(value.tolist())
    return value


def _pretty(fields: Mapping[str, Any]) -> bytes:
    # Commits are long: json's own indenting, and a walk through everything in Python, would take most of a step's end.
    try:
        text = json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError):  # something JSON has no word for
        text = json.dumps(json_safe(fields), allow_nan=False)
    return msgspec.json.format(text, indent=1).encode() + b"\n"
