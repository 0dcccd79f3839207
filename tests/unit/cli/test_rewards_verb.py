"""`argusrl rewards rescore` on a run folder that the real journal wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from argusrl.cli.main import run
from argusrl.config.load import write_resolved
from argusrl.config.validate import validate
from argusrl.journal.retention import retired_record
from argusrl.storage.publish import publish_file
from argusrl.storage.sealed_json import encode_sealed
from fakes.run_folder import RunBuilder


@pytest.fixture
def builder(tmp_path: Path) -> RunBuilder:
    """Two steps of two trajectories that were paid 0 and 1."""
    builder = RunBuilder(tmp_path / "runs")
    values = {"model": {"path": "m"}, "data": {"train": "x"}, "evaluate": {"every_steps": 0}}
    builder.run.config.unlink()
    write_resolved(validate({**values, "rewards": [{"kind": "format", "pattern": ".*"}]}), builder.run.config)
    for _ in range(2):
        builder.step()
    return builder


def rescore(builder: RunBuilder, *words: str) -> int:
    return run(["rewards", "rescore", str(builder.run.path), *words])


def test_every_committed_trajectory_is_paid_again(builder, tmp_path, capsys):
    out = tmp_path / "scores.jsonl"
    files = sorted(builder.run.path.rglob("*"))
    assert rescore(builder, "rewards.0.weight=3", "--out", str(out), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [(one["step"], one["trajectories"], one["before"], one["after"]) for one in report] == [
        (1, 2, 0.5, 3.0),
        (2, 2, 0.5, 3.0),
    ]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["step"], row["prompt_id"], row["sample"]) for row in rows] == [
        (step, "p0", sample) for step in (1, 2) for sample in (0, 1)
    ]
    assert sorted(builder.run.path.rglob("*")) == files


def test_the_rewards_of_a_recipe_may_be_taken(builder, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def pay(replies): return 7.0 * len(replies)\n")
    recipe = tmp_path / "other.yaml"
    values = {"model": {"path": "m"}, "data": {"train": "x"}, "evaluate": {"every_steps": 0}}
    recipe.write_text(json.dumps({**values, "rewards": [{"kind": "python", "function": "mine.py:pay"}]}))
    assert rescore(builder, "--recipe", str(recipe), "--json") == 0
    assert {one["after"] for one in json.loads(capsys.readouterr().out)} == {7.0}


def test_what_cannot_be_scored_is_said_and_is_no_zero(builder, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def pay(info): raise ValueError('not for me')\n")
    recipe = tmp_path / "other.yaml"
    values = {"model": {"path": "m"}, "data": {"train": "x"}, "evaluate": {"every_steps": 0}}
    recipe.write_text(json.dumps({**values, "rewards": [{"kind": "python", "function": "mine.py:pay"}]}))
    assert rescore(builder, "--recipe", str(recipe)) == 0
    assert "4 trajectories could not be scored" in capsys.readouterr().out


def test_steps_whose_trajectories_were_retired_are_passed_by(builder, capsys):
    folder = builder.run.trajectories(1)
    record = {"path": builder.run.relative(folder), "kind": "trajectories", "step": 1, "time": 0.0}
    publish_file(retired_record(builder.run, builder.run.relative(folder)), encode_sealed(record))
    shutil.rmtree(folder)
    assert rescore(builder, "--json") == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)] == [2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rewards.4.weight=2"], "rewards is a list"),
        (["--recipe", "gone.yaml"], "gone.yaml"),
        (["--out", "no/such/folder/x.jsonl"], "--out"),
    ],
)
def test_mistakes_end_with_2(builder, capsys, words, said):
    assert rescore(builder, *words) == 2
    assert said in capsys.readouterr().err


def test_a_run_that_is_none_ends_with_2(tmp_path, capsys):
    assert run(["rewards", "rescore", "nothing", "--root", str(tmp_path)]) == 2
    assert "no such run" in capsys.readouterr().err
