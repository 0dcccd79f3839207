"""What argusrl asks of vLLM's workers, loaded by vLLM by name. Arguments and results are plain data: they may
cross a process border."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from argusrl.rollout.merging import USE_LORA, CannotMerge, MergedWeights, renames_of
from argusrl.rollout.sampling_noise import PositionKeyedNoise
from argusrl.storage.adapter_folder import tensors_of
from argusrl.storage.digests import logical_digest

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer


class WorkerExtension:
    """Mixed into vLLM's worker class; methods are called through `collective_rpc`."""

    model_runner: Any
    merged_weights: MergedWeights  # of an engine that merges

    def argusrl_attach_noise(self) -> int:
        """Connect the noise to the batch's generators. Returns how many processors were connected."""
        batch = self.model_runner.input_batch
        processors = [one for one in batch.logitsprocs.all if isinstance(one, PositionKeyedNoise)]
        for processor in processors:
            processor.attach(batch.generators)
        return len(processors)

    def argusrl_load_adapter(self, lora_id: int, config: bytes, file: Buffer) -> dict[str, str]:
        """Load a LoRA adapter (adapter_config.json, safetensors file) under an id that never existed, and prove it.

        Returns what `argusrl_prove_adapter` does.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        loras = self.model_runner.lora_manager
        adapters = loras._adapter_manager
        helper = PEFTHelper.from_dict(json.loads(config))
        helper.validate_legal(loras.lora_config)
        lora = LoRAModel.from_lora_tensors(
            lora_id,
            _tensors(file),  # its own: vLLM multiplies them by the scaling, in place
            helper,
            device="cpu",
            dtype=loras.lora_config.lora_dtype,
            model_vocab_size=loras.vocab_size,
            weights_mapper=renames_of(adapters.model),
        )
        adapters.add_adapter(lora)
        adapters.activate_adapter(lora_id)
        return self.argusrl_prove_adapter(lora_id, config, file)

    def argusrl_prove_adapter(self, lora_id: int, config: bytes, file: Buffer) -> dict[str, str]:
        """Compare what lies in the model's LoRA layers with the safetensors file that was published.

        Returns {"sha256": logical digest of the file's tensors} when every tensor of the file reached exactly one
        layer unchanged (up to vLLM's own cast, scaling and sharding) and nothing else is in the adapter's slot;
        {"problem": reason} otherwise.
        """
        tensors = _tensors(file)
        adapters = self.model_runner.lora_manager._adapter_manager
        problem = _not_finite(tensors) or _not_served(adapters, lora_id, tensors, config)
        return {"problem": problem} if problem else {"sha256": _digest(file)}

    def argusrl_keep_pristine(self, targets: list[str]) -> int:
        """Get ready to merge adapters into layers with these last names (none: all): keep hold of the checkpoint's
        weights. Returns their bytes. Raises CannotMerge."""
        from vllm.model_executor.model_loader import get_model_loader

        runner = self.model_runner
        model = runner.get_model()
        loader: Any = get_model_loader(runner.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise CannotMerge(f"{type(loader).__name__} has no checkpoint to go back to; {USE_LORA}")
        checkpoint = loader.get_all_weights(runner.model_config, model)
        self.merged_weights = MergedWeights(model, checkpoint, targets)
        return self.merged_weights.pristine_bytes

    def argusrl_offer_adapter(self, config: bytes, file: Buffer) -> dict[str, str]:
        """Take a LoRA adapter to be merged by its digest: changes no weight.

        Returns {"sha256": logical digest of the file's tensors} or {"problem": reason}.
        """
        tensors, sha256 = _tensors(file), _digest(file)
        problem = _not_finite(tensors)
        if not problem:
            self.merged_weights.offer(sha256, json.loads(config), tensors)
        return {"problem": problem} if problem else {"sha256": sha256}

    def argusrl_merge(self, sha256: str | None) -> None:
        """Put an offered adapter into the weights, or with None the base model alone, and read the layers back.

        The caller resets the prefix cache. Raises MergeFailed.
        """
        self.merged_weights.merge(sha256)

    def argusrl_check_weights(self, file: Buffer) -> dict[str, str]:
        """Whether a safetensors file (full-parameter training) can replace weights: changes nothing.

        Returns {"sha256": logical digest} or {"problem": reason}.
        """
        tensors = _tensors(file)
        problem = _not_finite(tensors) or _not_replaceable(self.model_runner.get_model(), tensors)
        return {"problem": problem} if problem else {"sha256": _digest(file)}

    def argusrl_load_weights(self, file: Buffer) -> None:
        """Replace weights by those of a checked file. The caller resets vLLM's caches."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.model_runner.reload_weights(weights_iterator=iter(_tensors(file).items()))
        for module in self.model_runner.get_model().modules():
            if isinstance(module, ParallelLMHead):
                # A head tied to the embeddings is not reloaded by itself, but on CPU it multiplies with a packed copy.
                module.quant_method.process_weights_after_loading(module)


def _tensors(file: Buffer) -> dict[str, torch.Tensor]:
    """Copies of a file's tensors: the file may be read-only memory that processes share."""
    import torch

    return {
        one.name: torch.frombuffer(bytearray(one.data), dtype=getattr(torch, one.dtype)).view(one.shape)
        for one in tensors_of(file)
    }


def _digest(file: Buffer) -> str:
    return logical_digest((one.name, one.dtype, one.shape, one.data) for one in tensors_of(file))


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


def _not_served(adapters: Any, lora_id: int, tensors: dict[str, torch.Tensor], config: bytes) -> str | None:
    """Why the slot of `lora_id` does not hold exactly `tensors`, or None."""
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.utils import parse_fine_tuned_lora_name

    if lora_id not in adapters.lora_index_to_id:
        return "the adapter holds no slot in the model"
    slot = adapters.lora_index_to_id.index(lora_id)
    peft = PEFTHelper.from_dict(json.loads(config))
    mapper = renames_of(adapters.model)
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
