from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argusrl.cli.main import run
from argusrl.cluster.plan.lines import PHASES

ROOT = Path(__file__).parents[3]
HYPERPOD = str(ROOT / "recipes" / "qwen3vl_8b_hyperpod.yaml")
G7E = ("--instance", "ml.g7e.12xlarge", "--nodes", "3")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    values: dict[str, Any] = {
        "model": {"path": "elsewhere/Qwen3-VL-8B-Instruct", "max_pixels": 1 << 20},
        "data": {"kind": "files", "train": "rows.jsonl", "heldout": "more.jsonl"},
        "rewards": [{"kind": "exact"}],
        "cluster": {"device": "cuda", "slots": 8},
    }
    path.write_text(json.dumps(values))
    return str(path)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = run(["plan", *words])
    return code, capsys.readouterr().out


def test_the_reference_recipe_fits_the_published_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, HYPERPOD, *G7E)
    assert code == 0
    for words in ("3 × ml.g7e.12xlarge: 6 ranks, 6 engines", "KV cache", "GCS, dashboard", "it fits", "one step ahead"):
        assert words in text


def test_json_has_every_line_of_every_phase_with_its_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, HYPERPOD, *G7E, "--json")
    found = json.loads(text)
    assert code == 0
    assert found["fits"] is True
    assert found["fix"] is None
    gpu = found["tables"]["GPU with rank and engine"]
    assert set(gpu["phases"]) == set(PHASES)
    by_name = {line["name"]: line for line in gpu["lines"]}
    assert by_name["engine weights"]["bytes"] == 2 * 8_767_123_696
    assert by_name["engine weights"]["inputs"]["parameters"] == 8_767_123_696
    for table in found["tables"].values():
        for phase, lines in table["phases"].items():
            own = {line["name"] for line in table["lines"] if line["reclaimable"]}
            assert table["totals"][phase] == sum(size for name, size in lines.items() if name not in own)
    assert all(line["formula"] for table in found["tables"].values() for line in table["lines"])
    assert found["assumptions"]["cuda_context_bytes"]["source"] == "assumed"


@pytest.mark.parametrize(
    ("change", "limit", "knob"),
    [
        ("engine.gpu_memory_share=0.1", "engine's weights", "engine.gpu_memory_share=0.4"),
        ("engine.cache_bytes=1048576", "KV cache", "engine.cache_bytes="),
        ("engine.gpu_memory_share=0.99", "in rollout", "engine.gpu_memory_share=0.9"),
        (
            "training.gradient_checkpointing=false",
            "GPU with rank and engine in",
            "training.gradient_checkpointing=true",
        ),
    ],
)
def test_the_first_limit_that_fails_is_named_with_the_knob_that_fixes_it(
    change: str, limit: str, knob: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = answer(capsys, recipe, change, "--instance", "g6e.48xlarge")
    assert code == 7
    assert limit in text.partition("does not fit:")[2].partition("\n")[0]
    assert f"→ {knob}" in text
    fixed = text.rpartition("→ ")[2].split()[0]
    assert answer(capsys, recipe, change, fixed, "--instance", "g6e.48xlarge")[0] == 0


def test_small_gpus_are_told_by_their_size(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, recipe, "--gpu-gib", "80")[0] == 0
    code, text = answer(capsys, recipe, "--gpu-gib", "16", "--json")
    assert code == 7
    assert json.loads(text)["fits"] is False


OTHER = tuple(
    f"cluster.kubernetes.workers.{change}"
    for change in ("instance=ml.g6.2xlarge", "instance_group=null", "nodes=6", "cpus=8", "memory=64Gi", "gpus=1")
)


def test_nodes_of_a_type_that_is_not_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, HYPERPOD, *OTHER)
    assert code == 0
    assert "6 × ml.g6.2xlarge: 6 ranks" in text
    assert "--gpu-gib to see whether it fits" in text
    code, text = answer(capsys, HYPERPOD, *OTHER, "--gpu-gib", "96")
    assert code == 0
    assert "it fits" in text
    small = "cluster.kubernetes.head.memory=1Gi"
    code, text = answer(capsys, HYPERPOD, *OTHER, small, "--gpu-gib", "96")
    assert code == 7
    assert "→ cluster.kubernetes.head.memory=" in text


def test_another_size_of_gpu_keeps_nodes_and_head(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, HYPERPOD, "--gpu-gib", "80", "cluster.kubernetes.head.memory=1Gi")
    assert code == 7
    assert "3 × ml.g7e.12xlarge with GPUs of 80 GiB: 6 ranks" in text
    assert "does not fit: host memory of the head" in text


def test_without_a_machine_nothing_is_judged(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, recipe, "cluster.address=auto", "run.root=/not/here")
    assert code == 0
    assert "not known" in text


def test_a_cpu_run_is_planned_for_this_machine(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, str(ROOT / "recipes" / "quickstart.yaml"), "cluster.device=cpu", "--json")
    found = json.loads(text)
    assert code == (0 if found["fits"] else 7)
    host = found["tables"]["host memory"]
    assert host["capacity_bytes"] > 0
    assert "KV cache (engines)" in {line["name"] for line in host["lines"]}


@pytest.mark.parametrize(("nodes", "slots"), [("5", 10), ("1", 2)])
def test_the_slots_follow_the_nodes_of_the_command_line(
    nodes: str, slots: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe says 6 slots for its own 3 nodes; a manifest of other nodes would be refused with them."""
    text = answer(capsys, HYPERPOD, "cluster.slots=6", *G7E[:2], "--nodes", nodes)[1]
    assert f"cluster.slots={slots} instead of 6: {nodes} × ml.g7e.12xlarge" in text
    assert f"{slots} ranks, {slots} engines" in text


def test_what_the_manifest_refuses_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["plan"], ["cluster", "manifest"]):
        assert run([*verb, HYPERPOD, "cluster.slots=4"]) == 2
        assert "3 nodes of 2 GPUs are 6 slots" in capsys.readouterr().err


def test_a_model_config_that_is_not_there_is_named(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", recipe, "--model-config", "/nonexist"]) == 2
    assert "--model-config /nonexist: there is no such file or folder" in capsys.readouterr().err


def test_what_is_assumed_may_be_set(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (recipe, "--instance", "ml.g6e.48xlarge", "--json")
    before = json.loads(answer(capsys, *words)[1])
    after = json.loads(answer(capsys, *words, "--assume", "training_utilisation=0.7")[1])
    assert after["seconds"]["train"] == pytest.approx(before["seconds"]["train"] / 2, rel=1e-3)
    assert run(["plan", *words, "--assume", "training_utilization=0.7"]) == 2
    assert "did you mean training_utilisation" in capsys.readouterr().err


def test_a_model_that_is_not_here(
    recipe: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", recipe, "model.path=nobody/nothing"]) == 4
    error = capsys.readouterr().err
    assert "nobody/nothing" in error
    assert "--model-config" in error
    code, text = answer(capsys, recipe, "model.path=nobody/nothing", "--model-config", str(tiny_model), "--json")
    assert code == 0
    assert json.loads(text)["model"]["parameters"] < 10_000_000


def test_nodes_need_a_type(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", recipe, "--nodes", "3"]) == 2
    assert run(["plan", recipe, "--instance", "ml.g7e.11xlarge"]) == 2
    assert "ml.g7e.12xlarge" in capsys.readouterr().err
