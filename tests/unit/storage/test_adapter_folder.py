"""Adapter files: read whole or not at all, and taken apart without a copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from argusrl.errors import CorruptionError
from argusrl.storage.adapter_folder import read_adapter, tensors_of
from argusrl.storage.layout import RunFolder
from fakes.run_folder import publish_adapter

TENSORS = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.ones((4,), np.float64)}


def test_tensors_are_those_that_were_saved_and_share_the_memory_of_the_file() -> None:
    file = np.frombuffer(save(TENSORS, metadata={"format": "pt"}), np.uint8).copy()
    found = {one.name: one for one in tensors_of(file)}
    assert set(found) == set(TENSORS)
    for name, one in found.items():
        array = np.frombuffer(one.data, one.dtype).reshape(one.shape)
        assert (array == TENSORS[name]).all()
        assert np.shares_memory(array, file)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:20],
        lambda data: b"",
        lambda data: data.replace(b'"F32"', b'"F64"'),
        lambda data: data.replace(b'"F32"', b'"Q32"'),
        lambda data: data.replace(b"[2,3]", b"[2,2]"),
        lambda data: (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_a_file_that_is_not_whole_is_refused(damage) -> None:
    with pytest.raises(CorruptionError, match="safetensors"):
        tensors_of(damage(save(TENSORS)))


def test_a_published_folder_is_read_whole(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    folder = run.absolute(publish_adapter(run, 3, 1).path)
    files = read_adapter(folder)
    assert files.tensors.tobytes() == (folder / "adapter_model.safetensors").read_bytes()
    assert files.config == b'{"r": 8}'


@pytest.mark.parametrize("name", ["manifest.json", "adapter_model.safetensors", "adapter_config.json"])
def test_a_folder_that_lacks_a_file_is_refused(tmp_path: Path, name: str) -> None:
    run = RunFolder(tmp_path)
    folder = run.absolute(publish_adapter(run, 3, 1).path)
    (folder / name).unlink()
    with pytest.raises(CorruptionError):
        read_adapter(folder)


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    folder = run.absolute(publish_adapter(run, 3, 1).path)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match="bytes"):
        read_adapter(folder)
