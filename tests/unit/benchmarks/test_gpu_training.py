from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fakes.benchmark import load_benchmark

GPU = load_benchmark("gpu_training")


def phases(text: str) -> dict[str, Any]:
    """What was printed line by line, and that the last line holds all of it."""
    lines = [json.loads(line) for line in text.splitlines()]
    found = {line.pop("phase"): line for line in lines[:-1]}
    assert found == lines[-1]
    return found


def test_a_rehearsal_goes_through_every_phase(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    assert GPU.main(["--rehearse", "--output", str(output)]) == 0
    found = phases(capsys.readouterr().out)
    assert json.loads(output.read_text()) == found
    for name in ("shared", "shared_checkpointed", "packed", "padded"):
        assert found[name]["prompts"] == GPU.SMALL_LOAD.prompts
        assert found[name]["update"] == "applied"
        assert found[name]["expected_bytes"] > 0
        assert found[name]["utilisation"] > 0
    assert found["ratios"].keys() >= {"shared_vs_packed", "shared_vs_padded"}
    assert max(found["sameness"][name] for name in ("shared", "packed", "padded")) < 1e-5
    assert found["handing_over"]["equal"]
    for strategy in ("mask", "gathered"):
        assert max(found["attention"]["float32"][strategy].values()) < 1e-5
        assert max(found["attention"]["bfloat16"][strategy].values()) < 2e-2


def test_a_micro_batch_that_does_not_fit_is_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    sizes = []
    step = GPU._step

    def short_of_memory(bench: Any, made: Any, batches: Any) -> Any:
        sizes.append(len(batches[0]))
        if len(sizes) == 1:
            raise torch.OutOfMemoryError("too large")
        return step(bench, made, batches)

    monkeypatch.setattr(GPU, "_step", short_of_memory)
    bench = GPU.Bench(device="cpu", dtype="float32", load=GPU.SMALL_LOAD, deadline=float("inf"))
    with GPU.process_group("cpu"):
        made = GPU.RandomPolicy.make(tmp_path, GPU.SMALL, device="cpu", dtype="float32")
        found = GPU.train(bench, made)
    assert sizes == [2 * GPU.SMALL_LOAD.group_size, GPU.SMALL_LOAD.group_size]
    assert found["per_micro_batch"] == 1
    assert found["update"] == "applied"


def test_without_time_every_phase_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert GPU.main(["--rehearse", "--seconds", "0"]) == 0
    found = phases(capsys.readouterr().out)
    assert "skipped" in found["attention"]


def test_a_phase_that_fails_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    bench = GPU.Bench(device="cpu", dtype="float32", load=GPU.SMALL_LOAD, deadline=float("inf"))
    bench.phase("broken", 0, lambda: {"value": 1 // 0})
    bench.phase("sound", 0, lambda: {"value": 1})
    assert "ZeroDivisionError" in bench.results["broken"]["error"]
    assert bench.results["sound"]["value"] == 1
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_wheels_come_before_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(sys, "path", list(sys.path))
    with zipfile.ZipFile(tmp_path / "carried-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_by_wheel.py", "ANSWER = 42\n")
    GPU.use_wheels(None, tmp_path)
    import carried_by_wheel  # type: ignore[import-not-found]

    assert carried_by_wheel.ANSWER == 42


def test_the_8b_model_and_its_load_fit_one_large_gpu() -> None:
    """By the estimate: without checkpointing at least one group of the full load, in 139 GiB."""
    from argusrl.config.estimate import MicroBatch, training_memory
    from argusrl.config.model_shape import ModelShape

    shape = ModelShape.from_json({**GPU.QWEN3_VL_8B, "model_type": "qwen3_vl"})
    load = GPU.FULL_LOAD
    tokens = 3 + (load.image_side // 32) ** 2 + load.text_tokens
    assert tokens == 1200
    group = MicroBatch.of_groups(
        1, prompt_tokens=tokens, response_tokens=load.response_tokens, group_size=load.group_size, patches=4096
    )
    memory = training_memory(
        shape, group, element_bytes=2, rank=GPU.LORA_RANK, gradient_checkpointing=False, attention="varlen"
    )
    assert memory.total < 0.9 * 139 * 2**30
