"""The engine contract on the fake and on vLLM, and what only vLLM can show: its numbers equal transformers'."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from argusrl.errors import AdapterRefused, EngineError, WorkerLost
from argusrl.rollout.sequences import RunningSequence
from argusrl.storage.digests import logical_digest
from argusrl.types import AdapterFiles, AdapterRef
from contracts.engine_contract import (
    EngineCase,
    SeveralVersionsContract,
    continued_from_everywhere,
    files_of,
)
from contracts.fake_engine import FakeEngine
from contracts.vllm_case import Reference, running_vllm, settings


@contextmanager
def running_fake(folder: Path) -> Iterator[EngineCase]:
    shapes = {"model.layers.0.q_proj": (8, 8), "model.layers.0.v_proj": (8, 4)}
    chosen = settings("none")
    engine = FakeEngine(chosen, image_pad=6, tokens_per_image=4, vocabulary=64, lora_modules=tuple(shapes))
    yield EngineCase(
        engine=engine,
        settings=chosen,
        image_start=3,
        image_pad=6,
        image_end=4,
        tokens_per_image=4,
        text_ids=range(10, 60),
        lora_shapes=shapes,
        folder=folder,
    )
    asyncio.run(engine.close())


class TestFakeEngine(SeveralVersionsContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> Iterator[EngineCase]:
        with running_fake(tmp_path) as case:
            yield case

    def test_another_engine_continues_from_any_token(self, case: EngineCase, tmp_path: Path) -> None:
        request = case.request(tuple(range(4)))
        replies = case.run(case.sample(request))
        with running_fake(tmp_path) as other:
            other.run(continued_from_everywhere(other, request, replies))


@pytest.mark.engine
class TestVllmEngine(SeveralVersionsContract):
    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
        with running_vllm(tiny_model, tmp_path_factory.mktemp("adapters")) as case:
            yield case

    def test_a_missing_module_is_noticed_even_where_the_digest_is_right(self, case: EngineCase) -> None:
        """The digest alone would prove the file; the layers are looked at, so stale weights cannot hide."""
        worker = case.engine._engine.model_executor.driver_worker.worker  # type: ignore[attr-defined]
        adapters = worker.model_runner.lora_manager._adapter_manager
        ref = case.run(case.load())
        (slot,) = [one for one in adapters.lora_index_to_id if one is not None]
        files = files_of(case.folder / f"v{ref.version:06d}", "adapter_model.safetensors")
        layer = next(one for name, one in adapters.modules.items() if name.endswith("o_proj"))
        assert "problem" not in worker.argusrl_prove_adapter(slot, files.config, files.tensors)
        layer.lora_b_stacked[0][adapters.lora_index_to_id.index(slot), 0, 0, 0] += 1
        assert "o_proj" in worker.argusrl_prove_adapter(slot, files.config, files.tensors)["problem"]

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("adapted", [False, True])
    def test_logprobs_equal_those_of_transformers(self, case: EngineCase, temperature: float, adapted: bool) -> None:
        version = case.run(case.load()).version if adapted else None
        request = case.request(tuple(range(8)), images=2, temperature=temperature, adapter_version=version)
        canary = case.canary()
        replies = case.run(case.sample(request))
        scores = case.run(case.engine.score(canary, version))
        reference = Reference(case, version)
        for reply in replies:
            expected = reference.logprobs(request, reply.response_ids, temperature, case.settings.banned_ids)
            assert reply.logprobs == pytest.approx(expected, abs=1e-5)
        plain = case.request(prompt=77)
        assert scores == pytest.approx(reference.logprobs(plain, canary.response_ids, 1.0, ()), abs=1e-5)


@pytest.mark.engine
class TestVllmFullParameters:
    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
        with running_vllm(tiny_model, tmp_path_factory.mktemp("weights"), lora_rank=None) as case:
            yield case

    def publish(self, case: EngineCase, *, without: str = "\0") -> tuple[AdapterRef, AdapterFiles]:
        """The language model's weights with noise, as full-parameter training publishes them."""
        version = next(case.versions)
        folder = case.folder / f"v{version:06d}"
        folder.mkdir()
        weights = load_file(Path(case.settings.model, "model.safetensors"))
        random = torch.Generator().manual_seed(version)
        tensors = {
            name: one.float() + 0.02 * torch.randn(one.shape, generator=random)
            for name, one in weights.items()
            if ".language_model." in name and without not in name
        }
        save_file(tensors, folder / "model.safetensors")
        digest = logical_digest((name, "float32", one.shape, one.numpy().tobytes()) for name, one in tensors.items())
        ref = AdapterRef(version=version, epoch=1, path=folder.name, sha256=digest, file_sha256="")
        return ref, files_of(folder, "model.safetensors")

    def test_new_weights_are_served_and_nothing_of_the_old_ones_is_left_in_a_cache(self, case: EngineCase) -> None:
        request = case.request(tuple(range(4)), images=2)
        base = case.run(case.sample(request))
        for _ in range(2):
            ref, files = self.publish(case)
            assert case.run(case.engine.load_adapter(ref, files)) == ref.sha256
            asked = replace(request, adapter_version=ref.version)
            replies = case.run(case.sample(asked))
            reference = Reference(case, None, load_file(case.folder / ref.path / "model.safetensors"))
            for reply in replies:
                expected = reference.logprobs(asked, reply.response_ids, 1.0, case.settings.banned_ids)
                assert reply.logprobs == pytest.approx(expected, abs=1e-5)
            assert replies != base
            base = replies

    def test_without_the_base_model_a_request_needs_a_version(self, case: EngineCase) -> None:
        case.run(case.engine.load_adapter(*self.publish(case)))
        with pytest.raises(EngineError, match="base model"):
            case.run(case.sample(case.request()))

    def test_a_part_of_a_fused_module_is_refused_and_changes_nothing(self, case: EngineCase) -> None:
        good, files = self.publish(case)
        case.run(case.engine.load_adapter(good, files))
        request = case.request((1, 2), adapter_version=good.version)
        before = case.run(case.sample(request))
        with pytest.raises(AdapterRefused, match="k_proj"):
            case.run(case.engine.load_adapter(*self.publish(case, without=".k_proj.")))
        assert case.run(case.sample(request)) == before


@pytest.mark.engine
class TestVllmContinued:
    def test_another_engine_continues_from_any_token(self, tiny_model: Path, tmp_path: Path) -> None:
        with running_vllm(tiny_model, tmp_path) as case:
            request = replace(case.request(tuple(range(4))), adapter_version=case.run(case.load()).version)
            replies = case.run(case.sample(request))
        (tmp_path / "other").mkdir()
        with running_vllm(tiny_model, tmp_path / "other") as other:
            ref, files = other.publish()  # the same numbers: they are drawn from the version
            other.run(other.engine.load_adapter(ref, files))
            other.run(continued_from_everywhere(other, request, replies))

    def test_a_log_probability_that_is_no_number_costs_its_request_alone(
        self, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running_vllm(tiny_model, tmp_path) as case:
            good, bad = case.request(tuple(range(4))), case.request(tuple(range(4)), prompt=1)
            expected = case.run(case.sample(good))
            original = RunningSequence.take

            def take(sequence: RunningSequence, output: Any = None) -> Any:
                piece = original(sequence, output)
                poisoned = piece is not None and sequence.state.external_req_id.startswith("p1#")
                return replace(piece, logprobs=(math.nan,) * len(piece.ids)) if poisoned else piece

            monkeypatch.setattr(RunningSequence, "take", take)

            async def work() -> None:
                served, refused = await asyncio.gather(case.sample(good), case.sample(bad), return_exceptions=True)
                assert served == expected
                assert isinstance(refused, EngineError)
                assert "request p1: the model gave a sampled token" in str(refused)

            case.run(work())


@pytest.mark.engine
class TestVllmThatDies:
    def test_a_step_that_fails_ends_every_call_and_close_still_works(self, tiny_model: Path, tmp_path: Path) -> None:
        with running_vllm(tiny_model, tmp_path) as case:

            def fail() -> None:
                raise RuntimeError("out of memory")

            case.engine._engine.step = fail  # type: ignore[attr-defined]

            async def work() -> None:
                calls = (case.sample(case.request(prompt=number)) for number in range(3))
                for outcome in await asyncio.gather(*calls, return_exceptions=True):
                    assert isinstance(outcome, WorkerLost)
                    assert "out of memory" in str(outcome)
                with pytest.raises(WorkerLost, match="out of memory"):
                    await case.engine.score(case.canary(), None)
                with pytest.raises(WorkerLost, match="out of memory"):  # what a watch asks
                    await case.engine.progress()

            case.run(work())
