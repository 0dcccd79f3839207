"""Publish trained tensors as an immutable folder: PEFT layout for LoRA, plain weights in full training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from argusrl.errors import ModelError, NumericsError, StorageError
from argusrl.storage.digests import logical_digest
from argusrl.storage.manifest import write_manifest
from argusrl.storage.publish import publish_folder
from argusrl.types import AdapterRef

LORA_FILE = "adapter_model.safetensors"
FULL_FILE = "model.safetensors"


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Logical digest of CPU tensors."""
    return logical_digest((name, _dtype(t), tuple(t.shape), _raw(t)) for name, t in tensors.items())


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises NumericsError: an engine would take NaN without a word and go on sampling."""
    broken = [name for name, tensor in sorted(tensors.items()) if not torch.isfinite(tensor).all()]
    if broken:
        raise NumericsError(
            f"{len(broken)} of {len(tensors)} trained tensors hold NaN or Inf, the first is {broken[0]}",
            "nothing was published; lower optimizer.learning_rate or optimizer.max_grad_norm",
        )


def publish(tensors: Mapping[str, Tensor], folder: Path, *, version: int, epoch: int, peft_config: Any) -> AdapterRef:
    """Write `folder`, which must not exist, and its manifest; `peft_config` is None for plain weights.

    Raises NumericsError before anything is written, FileExistsError, StorageError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    check_finite(tensors)
    file = FULL_FILE if peft_config is None else LORA_FILE
    digest = tensors_digest(tensors)
    with publish_folder(folder) as temporary:
        try:
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(whole, temporary / file, metadata={"format": "pt"})
        except SafetensorError as error:  # no OSError, although a full disk is what it met
            raise StorageError(f"cannot write {folder}: {error}", "check space and permissions of run.root") from error
        if peft_config is not None:
            peft_config.save_pretrained(str(temporary))
    kind = "full" if peft_config is None else "lora"
    fields = {"kind": kind, "version": version, "epoch": epoch, "sha256": digest, "file": file}
    manifest = write_manifest(folder, fields)
    return AdapterRef(
        version=version,
        epoch=epoch,
        path=f"{folder.parent.name}/{folder.name}",
        sha256=digest,
        file_sha256=manifest["files"][file]["sha256"],
    )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a published folder. Raises ModelError where there are none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    for file in (LORA_FILE, FULL_FILE):
        if (folder / file).is_file():
            try:
                return load_file(folder / file)
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{folder / file} cannot be read: {error}") from error
    raise ModelError(f"{folder} holds neither {LORA_FILE} nor {FULL_FILE}")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
