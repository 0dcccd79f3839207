"""The engine that merges adapters into its weights: the contract, exactness, and what must not go unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from argusrl.errors import AdapterRefused, WorkerLost
from argusrl.types import AdapterRef
from contracts.engine_contract import EngineCase, OneVersionContract
from contracts.vllm_case import Reference, running_vllm

LANGUAGE = "model.language_model.layers"


def merged_weights(case: EngineCase) -> Any:
    return case.engine._engine.model_executor.driver_worker.worker.merged_weights  # type: ignore[attr-defined]


def load_only(case: EngineCase, *modules: str) -> AdapterRef:
    """Load an adapter that has nothing but these."""
    shapes = {name: shape for name, shape in case.lora_shapes.items() if name.endswith(modules)}
    assert shapes
    return case.run(replace(case, lora_shapes=shapes).load())


def assert_equal_to_transformers(case: EngineCase, version: int) -> None:
    request = case.request(tuple(range(4)), images=2, adapter_version=version)
    tail = tuple(case.text_ids[:50])  # more than a block of the prefix cache
    request = replace(request, collapsed_ids=request.collapsed_ids + tail, expanded_ids=request.expanded_ids + tail)
    reference = Reference(case, version)
    for reply in case.run(case.sample(request)):
        expected = reference.logprobs(request, reply.response_ids, 1.0, case.settings.banned_ids)
        assert reply.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.engine
class TestMergingEngine(OneVersionContract):
    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
        with running_vllm(tiny_model, tmp_path_factory.mktemp("adapters"), merged=True) as case:
            yield case

    def test_nothing_of_vllms_lora_runs(self, case: EngineCase) -> None:
        assert case.engine._engine.vllm_config.lora_config is None  # type: ignore[attr-defined]

    def test_logprobs_equal_those_of_transformers_and_peft_and_of_no_earlier_version(self, case: EngineCase) -> None:
        """The same prompts under every version: what the prefix cache holds of the one before would show."""
        for _ in range(3):
            assert_equal_to_transformers(case, case.run(case.load()).version)

    def test_modules_without_a_change_get_their_own_weights_back(self, case: EngineCase) -> None:
        """q_proj is fused with k_proj and v_proj, gate_proj with up_proj."""
        case.run(case.load())
        for modules in (("q_proj", "down_proj"), ("v_proj",), ("up_proj", "o_proj")):
            assert_equal_to_transformers(case, load_only(case, *modules).version)

    def test_after_many_merges_the_base_model_is_there_bit_for_bit(self, case: EngineCase) -> None:
        request = case.request(tuple(range(8)), images=2)
        base = case.run(case.sample(request))
        first, files = case.publish()
        case.run(case.engine.load_adapter(first, files))
        adapted = case.run(case.sample(replace(request, adapter_version=first.version)))
        for _ in range(60):
            last = case.run(case.load())
        assert case.run(case.sample(replace(request, adapter_version=last.version))) != adapted
        assert case.run(case.sample(request)) == base
        case.run(case.engine.load_adapter(first, files))
        assert case.run(case.sample(replace(request, adapter_version=first.version))) == adapted

    def test_the_live_version_is_merged_again_after_the_base_model(self, case: EngineCase) -> None:
        live = case.run(case.load()).version
        request = case.request((1, 2), adapter_version=live)
        adapted = case.run(case.sample(request))
        base = case.run(case.sample(replace(request, adapter_version=None)))
        assert case.run(case.sample(request)) == adapted != base
        assert case.run(case.sample(replace(request, adapter_version=None))) == base

    def test_a_shape_that_does_not_fit_is_refused_and_changes_nothing(self, case: EngineCase) -> None:
        live = case.run(case.load()).version
        before = case.run(case.sample(case.request(adapter_version=live)))
        wrong = {name: (inputs, outputs + 1) for name, (inputs, outputs) in case.lora_shapes.items()}
        with pytest.raises(AdapterRefused, match="is not of shape"):
            case.run(replace(case, lora_shapes=wrong).load())
        with pytest.raises(AdapterRefused, match="no linear layer that was to be adapted"):
            case.run(replace(case, lora_shapes={"model.visual.blocks.0.attn.qkv": (64, 192)}).load())
        assert case.run(case.sample(case.request(adapter_version=live))) == before

    def test_the_pristine_weights_are_mapped_from_the_checkpoint(self, case: EngineCase) -> None:
        kept = merged_weights(case)
        assert len(kept._layers) == 4 * 3  # qkv, o, gate and up, down
        assert kept.pristine_bytes == 2 * sum(one * other for one, other in case.lora_shapes.values())  # bfloat16
        maps = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in maps if line.endswith("model.safetensors")]
        for layer in kept._layers.values():
            for part in layer.pristine:
                assert any(int(low, 16) <= part.data_ptr() < int(high, 16) for low, high in ranges)

    def test_where_vllm_keeps_its_weight_it_is_written_in_place(self, case: EngineCase) -> None:
        """As on a GPU, where captured graphs know the address. The packed copy that runs here stays as it is."""
        from argusrl.rollout import merging

        layer = next(one for name, one in merged_weights(case)._layers.items() if name.endswith("qkv_proj"))
        whole = torch.cat([part.float() for part in layer.pristine])
        empty, layer.module.weight = layer.module.weight, torch.nn.Parameter(torch.zeros_like(whole), False)
        try:
            address = layer.module.weight.data_ptr()
            a, b = torch.randn(4, whole.shape[1]), torch.randn(layer.pristine[1].shape[0], 4)
            weight = merging._weight(layer, {1: merging._Product(a, b, 0.5)})
            merging._install(layer.module, weight)
            outputs = layer.pristine[0].shape[0]
            whole[outputs : 2 * outputs] += 0.5 * b @ a
            assert torch.allclose(layer.module.weight, whole, atol=1e-5)
            assert torch.equal(layer.module.weight[:outputs], whole[:outputs])
            assert layer.module.weight.data_ptr() == address
        finally:
            layer.module.weight = empty


@pytest.mark.engine
class TestFaultsOfMerging:
    def test_forgotten_caches_would_show_and_a_layer_that_kept_its_weight_ends_the_engine(
        self, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from argusrl.rollout import merging

        targets = ("q_proj", "o_proj")
        with running_vllm(tiny_model, tmp_path, merged=True, lora_targets=targets) as case:
            assert len(merged_weights(case)._layers) == 2 * 3
            with pytest.raises(AdapterRefused, match="was to be adapted"):
                case.run(case.load())
            vllm = case.engine._engine  # type: ignore[attr-defined]
            with monkeypatch.context() as patch:
                patch.setattr(vllm, "reset_prefix_cache", lambda: True)
                assert_equal_to_transformers(case, load_only(case, *targets).version)
                with pytest.raises(AssertionError, match="approx"):
                    assert_equal_to_transformers(case, load_only(case, *targets).version)
            good = load_only(case, *targets).version
            assert_equal_to_transformers(case, good)
            monkeypatch.setattr(merging, "_install", lambda module, weight: None)
            with pytest.raises(WorkerLost, match="something else than the merged weight"):
                load_only(case, *targets)
            with pytest.raises(WorkerLost, match="replaced in part"):
                case.run(case.sample(case.request(adapter_version=good)))
            with pytest.raises(WorkerLost):  # what a watch asks: the engine is re-made
                case.run(case.engine.progress())
