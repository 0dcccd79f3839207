"""What argusrl asks of vLLM's workers, loaded by vLLM by name. Arguments and results are plain data: they may
cross a process border."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argusrl.rollout.sampling_noise import PositionKeyedNoise

if TYPE_CHECKING:
    import torch


class WorkerExtension:
    """Mixed into vLLM's worker class; methods are called through `collective_rpc`."""

    model_runner: Any

    def argusrl_attach_noise(self) -> int:
        """Connect the noise to the batch's generators. Returns how many processors were connected."""
        batch = self.model_runner.input_batch
        processors = [one for one in batch.logitsprocs.all if isinstance(one, PositionKeyedNoise)]
        for processor in processors:
            processor.attach(batch.generators)
        return len(processors)

    def argusrl_prove_adapter(self, lora_id: int, folder: str) -> dict[str, str]:
        """Compare what lies in the model's LoRA layers with the published file.

        Returns {"sha256": logical digest of the file's tensors} when every tensor of the file reached exactly one
        layer unchanged (up to vLLM's own cast, scaling and sharding) and nothing else is in the adapter's slot;
        {"problem": reason} otherwise.
        """
        from safetensors.torch import load_file

        from argusrl.storage.digests import logical_digest

        tensors = load_file(str(Path(folder, "adapter_model.safetensors")))
        adapters = self.model_runner.lora_manager._adapter_manager
        problem = _not_finite(tensors) or _not_served(adapters, lora_id, tensors, folder)
        if problem:
            return {"problem": problem}
        return {"sha256": logical_digest(_digest_items(tensors))}

    def argusrl_check_weights(self, folder: str) -> dict[str, str]:
        """Whether the folder's `model.safetensors` (full-parameter training) can replace weights: changes nothing.

        Returns {"sha256": logical digest} or {"problem": reason}.
        """
        from safetensors.torch import load_file

        from argusrl.storage.digests import logical_digest

        tensors = load_file(str(Path(folder, "model.safetensors")))
        problem = _not_finite(tensors) or _not_replaceable(self.model_runner.get_model(), tensors)
        return {"problem": problem} if problem else {"sha256": logical_digest(_digest_items(tensors))}

    def argusrl_load_weights(self, folder: str) -> None:
        """Replace weights by those of a checked folder. The caller resets vLLM's caches."""
        from safetensors.torch import load_file
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        tensors = load_file(str(Path(folder, "model.safetensors")))
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                # A head tied to the embeddings is not reloaded by itself, but on CPU it multiplies with a packed copy.
                module.quant_method.process_weights_after_loading(module)


def _digest_items(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    import torch

    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        yield name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw


def _not_finite(tensors: dict[str, torch.Tensor]) -> str | None:
    bad = sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all())
    return f"{len(bad)} tensors hold NaN or Inf, the first is {bad[0]}" if bad else None


def _not_replaceable(model: Any, tensors: dict[str, torch.Tensor]) -> str | None:
    """vLLM skips names it does not know, and a fused module of which only some parts come is silently wrong."""
    fused = {part: (whole, parts) for whole, parts in model.packed_modules_mapping.items() for part in parts}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in sorted(tensors):
        stem, _, last = name.rpartition(".")
        prefix, _, module = stem.rpartition(".")
        whole, parts = fused.get(module, (module, (module,)))
        missing = [part for part in parts if f"{prefix}.{part}.{last}" not in tensors]
        if missing:
            return f"{name} comes without {', '.join(missing)}, which vLLM fuses with it"
        target = f"{prefix}.{whole}.{last}"
        if (mapper.map_name(target) if mapper else target) not in known:
            return f"{name} is not a weight of the model"
    return None


def _not_served(adapters: Any, lora_id: int, tensors: dict[str, torch.Tensor], folder: str) -> str | None:
    """Why the slot of `lora_id` does not hold exactly `tensors`, or None."""
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import parse_fine_tuned_lora_name

    if lora_id not in adapters.lora_index_to_id:
        return "the adapter holds no slot in the model"
    slot = adapters.lora_index_to_id.index(lora_id)
    peft = PEFTHelper.from_local_dir(folder, None)
    mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)
    mapper = mapper.get_rename_mapper() if mapper is not None else None
    published: dict[str, dict[bool, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, is_a = parse_fine_tuned_lora_name(name, mapper)
        tensor = tensor.to(adapters.lora_config.lora_dtype)
        if not is_a:
            unmapped, _ = parse_fine_tuned_lora_name(name)
            tensor = tensor * peft.get_rank_and_scaling(unmapped)[1]
        published.setdefault(module, {})[is_a] = tensor
    for name, layer in adapters.modules.items():
        parts = [published.pop(part, {}) for part in adapters.packed_modules.get(name, [name])]
        problem = _layer_differs(layer, slot, parts)
        if problem:
            return f"{name}: {problem}"
    if published:
        return f"{len(published)} modules of the file are not in the model, the first is {min(published)}"
    return None


def _layer_differs(layer: Any, slot: int, parts: list[dict[bool, torch.Tensor]]) -> str | None:
    if any(len(part) == 1 for part in parts):
        return "only one of lora_A and lora_B was published"
    if not any(parts):
        left = any(one[slot].any() for one in (*_slices(layer.lora_a_stacked), *_slices(layer.lora_b_stacked)))
        return "the file has nothing for it, the model does" if left else None
    for is_a, stacked in ((True, layer.lora_a_stacked), (False, layer.lora_b_stacked)):
        expected: Any = [part.get(is_a) for part in parts]
        if layer.tp_size > 1:
            shard = layer.slice_lora_a if is_a else layer.slice_lora_b
            expected = shard(expected) if len(expected) > 1 else [shard(expected[0])]
        if len(expected) != len(stacked):
            return f"{len(stacked)} slices in the model, {len(expected)} published"
        if not all(_holds(loaded[slot, 0], one) for loaded, one in zip(stacked, expected, strict=True)):
            return f"lora_{'A' if is_a else 'B'} in the model is not what was published"
    return None


def _slices(stacked: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Linear layers keep a tuple of slices, embeddings one tensor; the slots are the first axis of each."""
    return stacked if isinstance(stacked, tuple) else (stacked,)


def _holds(loaded: torch.Tensor, expected: torch.Tensor | None) -> bool:
    """Whether `expected` lies in the upper left corner of `loaded` and zeros everywhere else."""
    import torch

    if expected is None:
        return not loaded.any()
    rows, columns = expected.shape
    if rows > loaded.shape[0] or columns > loaded.shape[1]:
        return False
    same = torch.equal(loaded[:rows, :columns], expected.to(loaded.device))
    return same and bool(loaded.count_nonzero() == expected.count_nonzero())
