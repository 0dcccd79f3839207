"""FSDP2: one group per decoder layer and vision block, then the rest; the same path for one rank and for many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from argusrl.policy.model import decoder_of, has_mrope

GATHER_BYTES = 1 << 30  # per collective, so that gathering a whole model does not need it twice


def make_mesh(device: str) -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("rank",))


class GradientWatch:
    """FSDP's reduce-scatter, which looks at this rank's own gradients before they are mixed with the others'."""

    def __init__(self) -> None:
        self._finite: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        finite = input_tensor.isfinite().all()
        self._finite = finite if self._finite is None else self._finite & finite
        return dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)

    def take(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """[] whether the backward since the last call gave finite gradients on this rank.

        One rank reduces nothing: there `parameters` hold its own gradients.
        """
        finite, self._finite = self._finite, None
        if finite is not None:
            return finite
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type=float("inf")).isfinite()


def shard(root: nn.Module, model: Any, mesh: DeviceMesh, dtype: torch.dtype) -> GradientWatch:
    """Shard `root`, which holds `model`, over the mesh. Parameters become DTensors split on dimension 0.

    Vision blocks are groups of their own only where every rank runs the tower in every micro-batch; in other
    models they belong to the root, so that a text-only micro-batch cannot leave the other ranks waiting.
    """
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if dtype != torch.float32:
        # inputs stay as they are: the vision tower's rotary angles are float32 on purpose
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    blocks = list(decoder_of(model).layers)
    if has_mrope(model.config):
        blocks += list(model.model.visual.blocks)
    watch = GradientWatch()
    for module in (*blocks, root):
        fully_shard(module, **options).set_custom_reduce_scatter(watch)
    return watch


def share_weights(root: nn.Module, full: Mapping[str, Tensor], buffers: Mapping[str, Tensor], device: str) -> None:
    """Hand rank 0's weights to all ranks: `full` is root.state_dict() before sharding (empty on other ranks).

    Buffers travel apart, because those that are not in a state dict (rotary frequencies) would stay garbage.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if dist.get_world_size() == 1:
        return
    if dist.get_rank() != 0:
        root.to_empty(device=device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(root, dict(full), options=options)
    for name, buffer in sorted(root.named_buffers()):
        if dist.get_rank() == 0:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, src=0)


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill(parameter: Tensor, value: Tensor) -> None:
    """Copy this rank's rows of a whole tensor into a sharded one."""
    rank, counts = dist.get_rank(), _rows_by_rank(parameter.shape, dist.get_world_size())
    first = sum(counts[:rank])
    with torch.no_grad():
        local(parameter).copy_(value[first : first + counts[rank]])


def gather_full(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors on the CPU, in name order, on every rank; a collective that all ranks call alike.

    All shards travel in one flat collective per dtype and GATHER_BYTES, since one per tensor is bound by latency.
    """
    bucket: list[str] = []
    used = 0
    for name in sorted(tensors):
        size = tensors[name].numel() * tensors[name].element_size()
        if bucket and (used + size > GATHER_BYTES or tensors[name].dtype != tensors[bucket[0]].dtype):
            yield from _gather_bucket(bucket, tensors)
            bucket, used = [], 0
        bucket.append(name)
        used += size
    if bucket:
        yield from _gather_bucket(bucket, tensors)


def _gather_bucket(names: list[str], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    world = dist.get_world_size()
    counts = {name: _rows_by_rank(tensors[name].shape, world) for name in names}
    totals = [sum(counts[name][rank] * _row_size(tensors[name].shape) for name in names) for rank in range(world)]
    flat = torch.cat([local(tensors[name]).detach().reshape(-1) for name in names])
    padded = flat.new_zeros(max(totals))
    padded[: flat.numel()] = flat
    gathered = flat.new_empty(world * padded.numel())
    dist.all_gather_single(gathered, padded)
    shares = list(gathered.cpu().view(world, -1))
    offsets = [0] * world
    for name in names:
        shape = tensors[name].shape
        pieces = []
        for rank in range(world):
            size = counts[name][rank] * _row_size(shape)
            pieces.append(shares[rank][offsets[rank] : offsets[rank] + size])
            offsets[rank] += size
        yield name, torch.cat(pieces).view(shape)


def _rows_by_rank(shape: torch.Size, world: int) -> list[int]:
    """How FSDP2 splits dimension 0: equal chunks of the rounded-up share, the last ones shorter or empty."""
    chunk = -(-shape[0] // world)
    return [max(0, min(chunk, shape[0] - rank * chunk)) for rank in range(world)]


def _row_size(shape: torch.Size) -> int:
    return shape[1:].numel()
