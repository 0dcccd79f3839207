"""The adapter inside the model's own weights: W + scaling · B A, so that decoding costs what the base model costs.

Lives in vLLM's worker. Each merge begins with the pristine W of the checkpoint, never with what the merge before
left, so nothing drifts and the base model comes back bit for bit. The checkpoint stays mapped from its files: its
pages are the kernel's, shared by all engines of a node, and no private memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_READ_BACK_COLUMNS = 64
USE_LORA = "use adapter.serving: lora"


class CannotMerge(ValueError):
    """The model or the adapter is not of a kind that can be merged; nothing was changed."""


class MergeFailed(RuntimeError):
    """A layer does not hold what was merged into it: the weights are in an unknown state."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One linear layer as vLLM runs it: what the checkpoint has as q_proj, k_proj and v_proj is one here."""

    name: str
    module: Any
    pristine: tuple[Tensor, ...]  # [outputs, inputs] of each part


@dataclass(frozen=True, slots=True)
class _Product:
    """The change of one part: scaling · B A."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank]
    scaling: float

    def added_to(self, weight: Tensor) -> Tensor:
        """[outputs, inputs] in the weight's type; computed in float32 on the weight's device."""
        import torch

        a, b = (one.to(weight.device, torch.float32) for one in (self.a, self.b))
        # Never in place: of a float32 checkpoint weight.float() is the pristine tensor itself.
        return torch.add(weight.float(), b @ a, alpha=self.scaling).to(weight.dtype)


_Change = dict[str, dict[int, _Product]]  # by layer, and place of the part in it


class MergedWeights:
    """A model whose language model can hold one adapter at a time in its weights.

    `checkpoint` gives names and tensors as the files have them; the tensors of linear layers of the language model
    are kept as they are, those with `targets` as the last part of their name, or all. Raises CannotMerge.
    """

    def __init__(self, model: Any, checkpoint: Iterable[tuple[str, Tensor]], targets: Collection[str] = ()) -> None:
        self._renames = renames_of(model)
        self._layers: dict[str, _Layer] = {}
        self._places: dict[str, tuple[str, int]] = {}  # of a part: its layer, and which part of it
        self._offered: dict[str, _Change] = {}  # by digest
        self._changed: set[str] = set()  # layers that are not pristine
        self._merges = itertools.count()
        found = dict(_linear_layers(model, targets))
        parts = {part for _, names in found.values() for part in names}
        weights = dict(self._pristine(checkpoint, parts))
        for name, (module, names) in found.items():
            missing = [part for part in names if part not in weights]
            if missing:
                raise CannotMerge(f"the checkpoint has no weight for {missing[0]}; {USE_LORA}")
            self._layers[name] = _Layer(name, module, tuple(weights[part] for part in names))
            self._places |= {part: (name, place) for place, part in enumerate(names)}

    def _pristine(self, checkpoint: Iterable[tuple[str, Tensor]], parts: set[str]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in checkpoint:
            renamed = self._renames.map_name(name) if self._renames is not None else name
            part = (renamed or "").removesuffix(".weight")
            if part in parts:
                yield part, tensor

    @property
    def pristine_bytes(self) -> int:
        """Of the kept weights. From safetensors they are mapped files, otherwise private memory."""
        return sum(one.nbytes for layer in self._layers.values() for one in layer.pristine)

    def offer(self, sha256: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Keep an adapter for `merge`; changes no weight. Raises CannotMerge, ValueError for names that vLLM lacks."""
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.utils import parse_fine_tuned_lora_name

        helper = PEFTHelper.from_dict(dict(config))
        halves: dict[str, dict[bool, Tensor]] = {}
        settings: dict[str, tuple[int, float]] = {}
        for name, tensor in tensors.items():
            part, is_a = parse_fine_tuned_lora_name(name, self._renames)
            if part not in self._places:
                raise CannotMerge(f"{name} belongs to no linear layer that was to be adapted")
            halves.setdefault(part, {})[is_a] = tensor
            settings[part] = helper.get_rank_and_scaling(parse_fine_tuned_lora_name(name)[0])
        change: _Change = {}
        for part, half in halves.items():
            layer, place = self._places[part]
            shape = tuple(self._layers[layer].pristine[place].shape)
            change.setdefault(layer, {})[place] = _product(part, half, *settings[part], shape)
        self._offered[sha256] = change

    def merge(self, sha256: str | None) -> None:
        """Put an offered adapter, or with None the base model, into the weights and read them back.

        Forgets adapters that were offered before. The caller sees to it that no request runs, and resets the prefix
        cache. Raises MergeFailed, after which the weights must not be used.
        """
        import torch

        change = self._offered[sha256] if sha256 is not None else {}
        if sha256 is not None:
            self._offered = {sha256: change}
        first_column = next(self._merges)
        with torch.no_grad():
            for name in sorted(self._changed | change.keys()):
                layer = self._layers[name]
                weight = _weight(layer, change.get(name, {}))
                _install(layer.module, weight)
                _read_back(layer, weight, first_column)
        self._changed = set(change)


def renames_of(model: Any) -> Any:
    """vLLM's mapper from the checkpoint's names to those of its own modules; None where they are the same."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper.get_rename_mapper() if mapper is not None else None


def _linear_layers(model: Any, targets: Collection[str]) -> Iterator[tuple[str, tuple[Any, list[str]]]]:
    """Name, module and names of parts of linear layers of the language model. Raises CannotMerge."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    language = model.get_language_model() if hasattr(model, "get_language_model") else model
    adapted = {id(module) for module in language.modules()}
    for name, module in model.named_modules():
        if not isinstance(module, LinearBase) or id(module) not in adapted:
            continue
        prefix, _, last = name.rpartition(".")
        parts = model.packed_modules_mapping.get(last, [last])
        if targets and not set(targets).intersection(parts):
            continue
        if type(module.quant_method) is not UnquantizedLinearMethod or _shards(module, 1) is None:
            raise CannotMerge(f"{name} is a {type(module).__name__} that cannot be merged into; {USE_LORA}")
        yield name, (module, [f"{prefix}.{part}" for part in parts])


def _shards(module: Any, parts: int) -> list[tuple[Any, ...]] | None:
    """What tells vLLM's weight loader where each part of a layer belongs; None for a kind of layer not known here."""
    from vllm.model_executor.layers import linear

    fused = type(module) in (linear.QKVParallelLinear, linear.MergedColumnParallelLinear)
    if fused and parts == 1:  # fused in the checkpoint already
        return [()]
    if type(module) is linear.QKVParallelLinear:
        return [("q",), ("k",), ("v",)]
    if type(module) is linear.MergedColumnParallelLinear:
        return [(place,) for place in range(parts)]
    if type(module) in (linear.ColumnParallelLinear, linear.RowParallelLinear):
        return [()]
    return None


def _product(part: str, half: dict[bool, Tensor], rank: int, scaling: float, shape: tuple[int, ...]) -> _Product:
    if len(half) == 1:
        raise CannotMerge(f"{part}: only one of lora_A and lora_B was published")
    a, b = half[True], half[False]
    if (tuple(a.shape), tuple(b.shape)) != ((rank, shape[1]), (shape[0], rank)):
        raise CannotMerge(f"{part}: B {tuple(b.shape)} times A {tuple(a.shape)} of rank {rank} is not of shape {shape}")
    return _Product(a, b, scaling)


def _weight(layer: _Layer, change: Mapping[int, _Product]) -> Any:
    """This worker's share of a layer's weight, its parts put together by vLLM's own loader."""
    import torch
    from vllm.model_executor.parameter import ModelWeightParameter

    module = layer.module
    data = torch.full(
        (module.output_size_per_partition, module.input_size_per_partition),
        torch.nan,  # a place that no part fills is found below
        dtype=module.weight.dtype,
        device=module.weight.device,
    )
    weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=module.weight_loader_v2)
    shards = _shards(module, len(layer.pristine)) or []
    for place, (shard, pristine) in enumerate(zip(shards, layer.pristine, strict=True)):
        part = pristine.to(data.device, data.dtype)
        if place in change:
            part = change[place].added_to(part)
        weight.weight_loader(weight, part, *shard)
    if not data.isfinite().all():
        raise MergeFailed(f"{layer.name}: the merged weight is not finite everywhere")
    return weight


def _install(module: Any, weight: Any) -> None:
    import torch

    if module.weight.numel():  # in place: captured graphs know the address
        module.weight.data.copy_(weight.data)
        return
    # On CPU vLLM multiplies with a packed copy and lets go of the weight it was made from.
    module.weight = torch.nn.Parameter(weight.data, requires_grad=False)
    module.quant_method.process_weights_after_loading(module)


def _read_back(layer: _Layer, weight: Any, first: int) -> None:
    """Ask the layer itself for columns of its weight, others in every merge: exact, since the inputs are one-hot."""
    import torch

    inputs = weight.shape[1]
    columns = (torch.arange(min(inputs, _READ_BACK_COLUMNS)) * max(1, inputs // _READ_BACK_COLUMNS) + first) % inputs
    columns = columns.to(weight.device)
    probe = torch.zeros(len(columns), inputs, dtype=weight.dtype, device=weight.device)
    probe.scatter_(1, columns[:, None], 1.0)
    held = layer.module.quant_method.apply(layer.module, probe)
    if not torch.equal(held, weight.data[:, columns].t()):
        raise MergeFailed(f"{layer.name} multiplies with something else than the merged weight")
