"""What the optimizer needs to go on bit-exactly, sharded on disk and loadable onto any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from argusrl.errors import CorruptionError, StorageError
from argusrl.policy.sharding import gather_full, local
from argusrl.storage.digests import LogicalDigest
from argusrl.storage.manifest import read_manifest, write_manifest
from argusrl.storage.publish import publish_folder
from argusrl.storage.visibility import await_published, await_visible

METADATA_FILE = ".metadata"  # DCP's own name for what lies where
MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingState:
    """Trainable parameters, Adam's moments and steps, the RNG state and the number of updates done."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self.parameters = dict(sorted(parameters.items()))
        self.optimizer = optimizer
        self.updates = 0  # optimizer updates applied since the run began

    def tensors(self) -> dict[str, Tensor]:
        """Everything sharded, by name: parameters and moments, the very tensors."""
        named: dict[str, Tensor] = {f"parameter/{name}": p.detach() for name, p in self.parameters.items()}
        for moment in MOMENTS:
            named |= {f"{moment}/{name}": self._adam(name)[moment] for name in self.parameters}
        return named

    def scalars(self) -> dict[str, Tensor]:
        """Everything that is the same on every rank."""
        steps = torch.stack([self._adam(name)["step"] for name in self.parameters])
        return {"random": torch.get_rng_state(), "steps": steps, "updates": torch.tensor(self.updates)}

    def restore_scalars(self, scalars: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(scalars["random"])
        for name, step in zip(self.parameters, scalars["steps"], strict=True):
            self._adam(name)["step"].copy_(step)
        self.updates = int(scalars["updates"])

    def digest(self) -> str:
        """Logical digest of it all; a collective. Equal states have equal digests on any number of ranks."""
        digest = LogicalDigest()
        for name, tensor in self._whole():
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            digest.add(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw)
        return digest.hexdigest()

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """Names ascend: exp_avg/…, exp_avg_sq/…, parameter/…, then the scalars' names."""
        yield from gather_full(self.tensors())
        yield from sorted((name, value.cpu()) for name, value in self.scalars().items())

    def _adam(self, name: str) -> dict[str, Tensor]:
        return self.optimizer.state[self.parameters[name]]


class CheckpointWriter:
    """Stages a copy at once and writes it in a thread, over a process group of its own."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._group = dist.new_group(backend="gloo")
        self._rank = dist.get_rank()  # a write that was given up may wake in a later group
        self._unfinished: list[Future[Path]] = []

    def save(self, state: TrainingState, folder: Path, fields: Mapping[str, Any]) -> Future[Path]:
        """All ranks call it with the same folder. The future is done when manifest and files are durable on this rank.

        Training may go on meanwhile: what is written is the state of now. The future raises StorageError or
        FileExistsError where rank 0 could not publish.
        """
        staged: dict[str, Any] = {name: _copy(tensor, self._mesh) for name, tensor in state.tensors().items()}
        staged |= {name: value.clone() for name, value in state.scalars().items()}
        self._unfinished = [future for future in self._unfinished if not future.done()]
        arguments = (list(self._unfinished), future := Future[Path](), staged, folder, dict(fields))
        self._unfinished.append(future)
        Thread(target=self._run, args=arguments, name="checkpoint", daemon=True).start()
        return future

    def _run(
        self, before: list[Future[Path]], future: Future[Path], staged: dict[str, Any], folder: Path, fields: Any
    ) -> None:
        """Write when the writes `before` are over, and answer, unless close gave this one up meanwhile."""
        wait(before)
        if future.cancelled():
            return
        try:
            written = self._write(staged, folder, fields)
        except BaseException as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(written)

    def _write(self, staged: dict[str, Any], folder: Path, fields: dict[str, Any]) -> Path:
        if self._rank != 0:
            return self._follow(staged, folder)
        try:
            with publish_folder(folder) as temporary:
                self._tell(temporary)
                files = self._save(staged, temporary)
                for name, size in files.items():
                    await_visible(temporary / name, size)
            write_manifest(folder, fields, files)
        except CheckpointException as error:  # no Exception in torch's eyes
            reasons = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
            failure = StorageError(f"cannot write {folder}: {reasons}", "check space and permissions of run.root")
            self._tell(failure)
            raise failure from error
        except Exception as error:
            self._tell(error)
            raise
        self._tell(None)
        return folder

    def _follow(self, staged: dict[str, Any], folder: Path) -> Path:
        """Write this rank's part where rank 0 says, then hear how publishing ended."""
        temporary = self._told()
        if isinstance(temporary, Exception):
            raise temporary
        await_visible(temporary)
        with suppress(CheckpointException):  # raised on every rank; rank 0 says so
            self._save(staged, temporary)
        if isinstance(outcome := self._told(), Exception):
            raise outcome
        return folder

    def _save(self, staged: dict[str, Any], temporary: Path) -> dict[str, int]:
        """All ranks write their parts; the files of all of them, and how far each reaches at least."""
        writer = dcp.FileSystemWriter(temporary, sync_files=True)
        metadata = dcp.save(staged, storage_writer=writer, process_group=self._group)
        sizes = {METADATA_FILE: 1}
        for part in metadata.storage_data.values():
            sizes[part.relative_path] = max(sizes.get(part.relative_path, 0), part.offset + part.length)
        return sizes

    def _tell(self, message: Any) -> None:
        dist.broadcast_object_list([message], src=0, group=self._group)

    def _told(self) -> Any:
        messages: list[Any] = [None]
        dist.broadcast_object_list(messages, src=0, group=self._group)
        return messages[0]

    def close(self) -> None:
        """Cancel the futures that are not done and leave their threads alone: one may hang in a dead group for ever."""
        for future in self._unfinished:
            future.cancel()


def load(state: TrainingState, folder: Path) -> dict[str, Any]:
    """Fill `state` from a checkpoint of any number of ranks; returns its manifest. All ranks call it.

    Raises CorruptionError where files are missing, torn, or hold another model's tensors.
    """
    await_published(folder)
    manifest = read_manifest(folder)
    tensors, scalars = state.tensors(), state.scalars()
    try:
        dcp.load({**tensors, **scalars}, checkpoint_id=folder)
    except (Exception, CheckpointException) as error:  # what went wrong on any rank, in many kinds
        raise CorruptionError(f"the checkpoint {folder} does not fit this run: {error}") from error
    state.restore_scalars(scalars)
    return manifest


def _copy(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A copy on the CPU that is sharded the same way."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    shard = local(tensor).detach().to("cpu", copy=True)
    return DTensor.from_local(
        shard, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
