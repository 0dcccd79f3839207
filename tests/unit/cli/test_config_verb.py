from __future__ import annotations

import json
from pathlib import Path

import pytest

from argusrl.cli.main import run
from argusrl.config.load import load_config, write_resolved

RECIPE = {
    "model": {"path": "some/model"},
    "data": {"kind": "files", "train": "rows.jsonl", "heldout": "more.jsonl"},
    "rewards": [{"kind": "exact"}],
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound recipe whose files exist, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "more.jsonl").touch()
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(RECIPE))
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = run(list(words))
    return code, capsys.readouterr().out


def test_check_accepts_a_sound_recipe(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, "config", "check", str(recipe))
    assert code == 0
    assert "is sound" in text
    code, text = answer(capsys, "config", "check", str(recipe), "algorithm.group_size=4", "--json")
    found = json.loads(text)
    assert found["sound"]
    assert found["config"]["algorithm"]["group_size"] == 4


def test_check_lists_what_is_wrong_and_ends_with_2(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, "config", "check", str(recipe), "algorithm.group_size=1", "adapter.rank=3", "--json")
    assert code == 2
    assert len(json.loads(text)["problems"]) == 2
    assert run(["config", "check", str(recipe), "algorithm.group_sise=1"]) == 2
    assert "did you mean algorithm.group_size" in capsys.readouterr().err


def test_check_looks_for_files_unless_told_not_to(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recipe.parent / "rows.jsonl").unlink()
    assert run(["config", "check", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert "data.train: no such file" in error
    assert "--without-files" in error
    assert run(["config", "check", str(recipe), "--without-files"]) == 0


def test_check_takes_what_only_pods_see_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    reference = str(Path(__file__).parents[3] / "recipes" / "qwen3vl_8b_hyperpod.yaml")
    mount = "/no/such/mount"
    seen = [f"run.root={mount}/runs", f"model.path={mount}/model", f"cluster.kubernetes.volume.mount={mount}"]
    assert run(["config", "check", reference, *seen]) == 0
    assert run(["config", "check", reference, *seen, "model.path=/mine"]) == 2
    assert f"model.path: pods do not see /mine; put it below {mount}" in capsys.readouterr().err


def test_check_finds_gpus_that_nobody_would_use(capsys: pytest.CaptureFixture[str]) -> None:
    reference = str(Path(__file__).parents[3] / "recipes" / "qwen3vl_8b_hyperpod.yaml")
    assert run(["config", "check", reference, "--without-files", "cluster.device=cpu"]) == 2
    assert "would hold 6 GPUs for nothing" in capsys.readouterr().err


def test_explain_and_schema(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = answer(capsys, "config", "explain", "algorithm.group_size")
    assert code == 0
    assert "Trajectories per prompt." in text
    assert "default 8" in text
    found = json.loads(answer(capsys, "config", "explain", "algorithm", "--json")[1])
    assert "algorithm.num_steps" in [key["path"] for key in found]
    assert json.loads(answer(capsys, "config", "schema")[1])["properties"]["model"]


def test_difference_of_a_run_and_a_recipe(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recipe.parent / "runs" / "mine"
    folder.mkdir(parents=True)
    write_resolved(load_config(recipe).config, folder / "config.yaml")
    assert "no difference" in answer(capsys, "config", "difference", "mine", str(recipe))[1]
    recipe.write_text(json.dumps({**RECIPE, "algorithm": {"num_steps": 7, "group_size": 4}}))
    found = json.loads(answer(capsys, "config", "difference", "mine", str(recipe), "--json")[1])
    assert found == [
        {"difference": "algorithm.num_steps: 100 → 7", "may_change_on_resume": True},
        {"difference": "algorithm.group_size: 8 → 4", "may_change_on_resume": False},
    ]


def test_a_recipe_that_its_nodes_cannot_hold_is_not_sound(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(Path(__file__).parents[3] / "recipes" / "qwen3vl_8b_hyperpod.yaml")
    assert run(["config", "check", recipe, "--without-files"]) == 0
    assert run(["config", "check", recipe, "--without-files", "cluster.slots=16"]) == 2
    assert "3 nodes of 2 GPUs are 6 slots" in capsys.readouterr().err
