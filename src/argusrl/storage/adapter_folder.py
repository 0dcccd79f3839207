"""The files of an adapter version: PEFT layout for LoRA, plain weights in full-parameter training.

What is read from storage and what is handed over in memory are the same bytes, taken apart by the same code.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argusrl.errors import CorruptionError
from argusrl.storage.files import read_file
from argusrl.storage.manifest import has_manifest, read_manifest
from argusrl.storage.visibility import await_published
from argusrl.types import AdapterFiles

if TYPE_CHECKING:
    from typing_extensions import Buffer

LORA_FILE = "adapter_model.safetensors"
FULL_FILE = "model.safetensors"
CONFIG_FILE = "adapter_config.json"

# Names in a safetensors header, as torch calls them, and bytes of one number.
_DTYPES = {"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """One tensor of a safetensors file, not copied."""

    name: str
    dtype: str  # as torch calls it: "float32"
    shape: tuple[int, ...]
    data: memoryview  # little-endian, row-major


def read_adapter(folder: Path) -> AdapterFiles:
    """The files of a published folder, whole. Raises CorruptionError where it is not complete, StorageError."""
    import numpy as np

    await_published(folder)
    if not has_manifest(folder):
        raise CorruptionError(f"{folder} has no manifest: it was not published to its end")
    file = read_manifest(folder)["file"]
    try:
        config = read_file(folder / CONFIG_FILE) if file == LORA_FILE else b""
        return AdapterFiles(config=config, tensors=np.frombuffer(read_file(folder / file), np.uint8))
    except FileNotFoundError as error:
        raise CorruptionError(f"{error.filename} is missing") from None


def tensors_of(file: Buffer) -> list[TensorBytes]:
    """The tensors of a safetensors file, in the order they lie in it. Raises CorruptionError unless it is whole."""
    whole = memoryview(file).cast("B")
    start = _LENGTH_BYTES + int.from_bytes(whole[:_LENGTH_BYTES], "little")
    try:
        header = json.loads(bytes(whole[_LENGTH_BYTES:start]))
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        found, end = [], start
        for name, entry in entries:
            first, last = (start + offset for offset in entry["data_offsets"])
            dtype, size = _DTYPES[entry["dtype"]]
            shape = tuple(entry["shape"])
            if first != end or last - first != size * math.prod(shape):
                raise ValueError(f"{name} lies at the wrong place")
            found.append(TensorBytes(name, dtype, shape, whole[first:last]))
            end = last
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptionError(f"not a safetensors file: {_first_line(error)}") from error
    if end != len(whole):
        raise CorruptionError(f"a safetensors file of {end} bytes came with {len(whole)}")
    return found


def _first_line(error: Exception) -> Any:
    return str(error).partition("\n")[0] or type(error).__name__
