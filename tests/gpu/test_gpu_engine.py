from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.vllm_case import Reference, running_vllm


@pytest.mark.engine
@pytest.mark.parametrize("merged", [True, False])
def test_captured_graphs_decode_with_the_adapter(device: str, tiny_model: Path, tmp_path: Path, merged: bool) -> None:
    """A graph reads weights at the addresses it was captured with, so an adapter has to be put in there in place."""
    if device == "cpu":
        pytest.skip("needs a CUDA GPU: on the CPU there are no graphs")
    pytest.importorskip("vllm", reason="needs vLLM with CUDA")
    with running_vllm(tiny_model, tmp_path, device="cuda", eager=False, merged=merged) as case:
        held = addresses(case)
        for _ in range(3):
            version = case.run(case.load()).version
            request = case.request(tuple(range(4)), images=1, adapter_version=version)
            reference = Reference(case, version)
            for reply in case.run(case.sample(request)):
                expected = reference.logprobs(request, reply.response_ids, 1.0, case.settings.banned_ids)
                assert reply.logprobs == pytest.approx(expected, abs=1e-3)
        assert addresses(case) == held


def addresses(case: Any) -> dict[str, int]:
    worker = case.engine._engine.model_executor.driver_worker.worker
    model = worker.model_runner.get_model()
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
