"""What is handed over in memory is what the folder holds, and only rank 0's storage decides whether it is durable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from argusrl.errors import NumericsError, StorageError
from argusrl.policy import adapter
from argusrl.storage.adapter_folder import read_adapter, tensors_of
from argusrl.storage.manifest import verify_manifest

TENSORS = {"x.lora_B.weight": torch.arange(6.0).view(3, 2), "x.lora_A.weight": torch.ones(2, 5)}


def staged(folder: Path, config: Any = None, **changes: torch.Tensor) -> Any:
    return adapter.stage({**TENSORS, **changes}, folder, version=3, epoch=2, peft_config=config)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_folder_holds_what_was_handed_over(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "adapters" / "v000003.e0002"
    ref, files = staged(folder, LoraConfig(r=2, lora_alpha=4, target_modules=["x"]) if kind == "lora" else None)
    assert not folder.exists()
    adapter.write_in_background(ref, files, folder).result(timeout=30)
    manifest = verify_manifest(folder)
    assert (manifest["kind"], manifest["version"], manifest["epoch"]) == (kind, 3, 2)
    assert manifest["files"][manifest["file"]]["sha256"] == ref.file_sha256
    assert manifest["sha256"] == ref.sha256 == adapter.tensors_digest(TENSORS)
    again = read_adapter(folder)
    assert again.tensors.tobytes() == files.tensors.tobytes()
    assert again.config == files.config
    assert json.loads(files.config or b'{"r": 2}')["r"] == 2
    assert {one.name for one in tensors_of(files.tensors)} == set(TENSORS)
    assert all(torch.equal(one, TENSORS[name]) for name, one in adapter.read_tensors(folder).items())


def test_nothing_that_is_not_finite_is_handed_over(tmp_path: Path) -> None:
    with pytest.raises(NumericsError, match=r"x\.lora_A"):
        staged(tmp_path / "v1", **{"x.lora_A.weight": torch.tensor([float("nan")])})


def test_a_version_is_there_in_memory_while_its_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "adapters").write_text("a file where a folder belongs")
    ref, files = staged(folder := tmp_path / "adapters" / "v1")
    publication = adapter.Publication(ref, files, adapter.write_in_background(ref, files, folder))
    assert len(tensors_of(files.tensors)) == 2
    with pytest.raises(StorageError, match="adapters"):
        publication.result(30)


def test_a_folder_that_exists_is_never_written_to(tmp_path: Path) -> None:
    ref, files = staged(folder := tmp_path / "v1")
    adapter.write(ref, files, folder)
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError):
        adapter.write(*staged(folder, **{"more": torch.ones(1)}), folder)
    assert (folder / "model.safetensors").read_bytes() == before


def test_storage_that_gives_back_other_bytes_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, files = staged(folder := tmp_path / "v1")
    write_bytes = Path.write_bytes

    def flipped(path: Path, data: Any) -> int:
        return write_bytes(path, bytes(data)[:-1] + b"!")

    monkeypatch.setattr(Path, "write_bytes", flipped)
    with pytest.raises(StorageError, match="other bytes"):
        adapter.write(ref, files, folder)
