"""Looks into safetensors files without torch: are all numbers finite?"""

from __future__ import annotations

import json
from pathlib import Path

from argusrl.errors import CorruptionError
from argusrl.storage.files import read_file

# dtype → (bytes of a number, mask of its exponent): all exponent bits set means NaN or infinite
_FLOATS = {"F64": (8, 0x7FF0 << 48), "F32": (4, 0x7F80 << 16), "F16": (2, 0x7C00), "BF16": (2, 0x7F80)}


def not_finite(path: Path) -> list[str]:
    """One line per tensor that holds NaN or infinity. Raises CorruptionError if it is no safetensors file."""
    import numpy as np

    try:
        data = read_file(path)
    except FileNotFoundError:
        raise CorruptionError(f"{path} is missing") from None
    try:
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        spans = {name: (entry["dtype"], *entry["data_offsets"]) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(f"{path} is no safetensors file: {error}") from error
    found = []
    for name, (dtype, first, last) in spans.items():
        if not 0 <= first <= last <= len(data) - start:
            raise CorruptionError(f"{path}: tensor {name} lies outside of the file")
        if dtype in _FLOATS:
            size, mask = _FLOATS[dtype]
            numbers = np.frombuffer(data[start + first : start + last], dtype=f"<u{size}")
            if (bad := int(((numbers & mask) == mask).sum())) > 0:
                found.append(f"{path}: {bad} of {numbers.size} numbers of {name} are NaN or infinite")
    return found
