"""`argusrl train` up to the supervisor: what it refuses, which run it chooses, and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from argusrl.cli.main import run
from argusrl.config.load import read_resolved
from argusrl.journal.attempts import Verdict, next_attempt, write_verdict
from argusrl.recovery import supervisor
from argusrl.recovery.resume import read_fork
from fakes.run_folder import RunBuilder

RECIPE = {"data": {"train": "rows.jsonl"}, "rewards": [{"kind": "exact"}], "evaluate": {"every_steps": 0}}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sound recipe in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "model").mkdir()
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({**RECIPE, "model": {"path": "./model"}}))
    return path


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> list:
    """The runs that would have been driven; the driver answers with the code of the list's `code`."""
    runs = []

    def supervise(folder, config, *, say, debug=False):
        runs.append((folder, config))
        return 75

    monkeypatch.setattr(supervisor, "supervise", supervise)
    return runs


def test_a_run_has_a_folder_and_a_resolved_config_before_its_driver_starts(recipe, supervised, tmp_path, capsys):
    assert run(["train", str(recipe), "algorithm.num_steps=7", "run.root=here"]) == 75
    ((folder, config),) = supervised
    assert folder.path == tmp_path / "here" / "mine"
    assert read_resolved(folder.config) == config
    assert config.algorithm.num_steps == 7
    assert "New run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("algorithm.group_sise=4", "did you mean algorithm.group_size"),
        ("algorithm.group_size=four", "algorithm.group_size"),
        ("algorithm.group_size=1", "advantage"),
        ("adapter.rank=3", "it serves 1, 8, 16"),
        ("model.path=./gone", "model.path"),
        ("data.train=gone.jsonl", "data.train"),
        ("group_size", "section.key=value"),
    ],
)
def test_a_mistake_ends_with_2_and_starts_nothing(recipe, supervised, tmp_path, capsys, change, said):
    assert run(["train", str(recipe), change]) == 2
    assert said in capsys.readouterr().err
    assert supervised == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("recipe_text", [None, "a: [", "- 1"])
def test_a_recipe_that_cannot_be_read_ends_with_2(tmp_path, capsys, recipe_text):
    path = tmp_path / "mine.yaml"
    if recipe_text is not None:
        path.write_text(recipe_text)
    assert run(["train", str(path)]) == 2
    assert "mine.yaml" in capsys.readouterr().err


def test_a_run_under_another_config_is_left_alone(recipe, supervised, capsys):
    run(["train", str(recipe)])
    folder = supervised[0][0]
    folder.commits.mkdir()
    folder.commit(0).write_text("{}")
    before = folder.config.read_bytes()
    assert run(["train", str(recipe), "run.seed=5"]) == 2
    assert "run.seed: 0 → 5" in capsys.readouterr().err
    assert folder.config.read_bytes() == before
    assert run(["train", str(recipe), "run.seed=5", "--fresh"]) == 75
    assert supervised[-1][0].name == "mine-2"


def test_a_fork_says_where_it_comes_from(recipe, supervised, tmp_path, capsys):
    builder = RunBuilder(tmp_path / "runs")
    builder.step()
    assert run(["train", str(recipe), "--from", "run@1", "optimizer.learning_rate=0.5"]) == 75
    ((folder, config),) = supervised
    assert read_fork(folder)["step"] == 1
    assert config.adapter.initial == builder.run.absolute(builder.head.adapter.path)
    assert run(["train", str(recipe), "--from", "run@2"]) == 2
    assert "last committed step is 1" in capsys.readouterr().err


def test_a_refused_recipe_imports_nothing_heavy(tmp_path):
    script = (
        "import sys; from argusrl.cli.main import run; code = run(['train', 'gone.yaml']);"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'numpy'} & set(sys.modules); print(code, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[-2] == "2 []"


def test_a_pod_never_begins_another_run_beside_its_own(recipe, supervised, tmp_path, monkeypatch, capsys):
    """The job of a run that has reached its end, started once more: elsewhere the name would be taken on, as mine-2."""
    assert run(["train", str(recipe), "algorithm.num_steps=1"]) == 75
    ((folder, _),) = supervised
    folder.commit(0).parent.mkdir()
    for step in (0, 1):
        folder.commit(step).write_bytes(b"")
    write_verdict(folder, next_attempt(folder), Verdict(outcome="complete", exit_code=0, reason=""))
    monkeypatch.setenv("ARGUSRL_RUN_FOLDER", str(folder.path))
    assert run(["train", str(recipe), "algorithm.num_steps=1"]) == 0
    assert len(supervised) == 1
    assert "is complete" in capsys.readouterr().out
    assert not folder.path.with_name("mine-2").exists()
