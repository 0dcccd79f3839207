"""Publish trained tensors: in memory at once, and as an immutable folder with the same bytes in the background."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from argusrl.errors import ModelError, NumericsError, StorageError
from argusrl.storage.adapter_folder import CONFIG_FILE, FULL_FILE, LORA_FILE
from argusrl.storage.digests import logical_digest, sha256_bytes
from argusrl.storage.manifest import write_manifest
from argusrl.storage.publish import publish_folder
from argusrl.storage.visibility import await_published
from argusrl.types import AdapterFiles, AdapterRef


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


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that engines can have; its folder may still be being written."""

    ref: AdapterRef
    files: AdapterFiles | None  # on rank 0
    written: Future[None]

    def result(self, timeout_seconds: float | None = None) -> AdapterRef:
        """Wait until the folder is durable (on rank 0). Raises FileExistsError, StorageError, TimeoutError."""
        self.written.result(timeout_seconds)
        return self.ref


def stage(
    tensors: Mapping[str, Tensor], folder: Path, *, version: int, epoch: int, peft_config: Any
) -> tuple[AdapterRef, AdapterFiles]:
    """What will lie in `folder`, in memory; `peft_config` is None for plain weights. Raises NumericsError."""
    from safetensors.torch import save

    check_finite(tensors)
    file = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})
    ref = AdapterRef(
        version=version,
        epoch=epoch,
        path=f"{folder.parent.name}/{folder.name}",
        sha256=tensors_digest(tensors),
        file_sha256=sha256_bytes(file),
    )
    return ref, AdapterFiles(config=_config_file(peft_config), tensors=np.frombuffer(file, np.uint8))


def write(ref: AdapterRef, files: AdapterFiles, folder: Path) -> None:
    """Write what was staged to `folder`, which must not exist, durably. Raises FileExistsError, StorageError."""
    file = LORA_FILE if files.config else FULL_FILE
    with publish_folder(folder) as temporary:
        (temporary / file).write_bytes(files.tensors.data)
        if files.config:
            (temporary / CONFIG_FILE).write_bytes(files.config)
    kind = "lora" if files.config else "full"
    fields = {"kind": kind, "version": ref.version, "epoch": ref.epoch, "sha256": ref.sha256, "file": file}
    found = write_manifest(folder, fields)["files"][file]["sha256"]
    if found != ref.file_sha256:
        raise StorageError(
            f"{folder / file} reads as {found}, what was written to it is {ref.file_sha256}",
            "the storage gives back other bytes than it was given: check it",
        )


def write_in_background(ref: AdapterRef, files: AdapterFiles, folder: Path) -> Future[None]:
    """`write` in a thread; the future has its outcome."""
    future: Future[None] = Future()

    def work() -> None:
        try:
            write(ref, files, folder)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    Thread(target=work, name="adapter", daemon=True).start()
    return future


def written() -> Future[None]:
    """On a rank that writes nothing."""
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _config_file(peft_config: Any) -> bytes:
    """adapter_config.json as PEFT writes it; empty for plain weights."""
    if peft_config is None:
        return b""
    with TemporaryDirectory() as folder:
        peft_config.save_pretrained(folder)
        return Path(folder, CONFIG_FILE).read_bytes()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a published folder. Raises ModelError where there are none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    await_published(folder)
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
