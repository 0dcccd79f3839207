"""One rank of two whose nodes see each other's files late, which test_late_checkpoint.py runs as a process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from argusrl.policy import checkpoint, group
from argusrl.policy.adapter import read_tensors
from argusrl.storage import visibility
from fakes.late_names import late_names

LATE_SECONDS = 0.1


def main(rank: int, port: int, folder: Path) -> None:
    visibility.patience_seconds = lambda folder: 20.0  # type: ignore[assignment]
    group.connect(rank=rank, world=2, host="127.0.0.1", port=port, name="late", timeout_seconds=60)
    mesh = init_device_mesh("cpu", (2,))
    state = _state(mesh, 1.0)
    with late_names(folder, LATE_SECONDS) as late:
        writer = checkpoint.CheckpointWriter(mesh)
        writer.save(state, folder / "checkpoints" / "000001.e0001", {"step": 1}).result(timeout=60)
        written = late.refusals
    torch.distributed.barrier()
    fresh = _state(mesh, 0.0)
    if rank == 1:
        with late_names(folder, LATE_SECONDS) as late:
            late.known = {str(folder)}  # it never looked at what is there
            loaded = checkpoint.load(fresh, folder / "checkpoints" / "000001.e0001")
            tensors = read_tensors(folder / "adapters" / "v1")
    else:
        loaded = checkpoint.load(fresh, folder / "checkpoints" / "000001.e0001")
        tensors = read_tensors(folder / "adapters" / "v1")
    same = fresh.digest() == state.digest()
    result = {"manifest": loaded, "same": same, "refusals": written, "tensors": list(tensors)}
    torch.save(result, folder.parent / f"rank{rank}.pt")
    group.disconnect()


def _state(mesh: object, value: float) -> checkpoint.TrainingState:
    weight = nn.Parameter(distribute_tensor(torch.full((8, 4), value), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.full_like(weight, value)
    optimizer.step()
    return checkpoint.TrainingState({"weight": weight}, optimizer)
