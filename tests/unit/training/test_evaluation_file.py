from __future__ import annotations

import json
import shutil

import pytest

from argusrl.errors import ConfigError, CorruptionError
from argusrl.storage.layout import RunFolder
from argusrl.training.evaluation_file import (
    choose_commit,
    history,
    read_evaluation,
    read_evaluations,
    require_adapter,
    write_evaluation,
)
from fakes.run_folder import RunBuilder


def record(step: int, accuracy: float) -> dict:
    return {"step": step, "sampled": {"accuracy": accuracy}, "metrics": {"evaluate/sampled/accuracy": accuracy}}


@pytest.fixture
def builder(tmp_path):
    """Three committed steps, evaluated at 0 and 2."""
    builder = RunBuilder(tmp_path)
    for _ in range(3):
        builder.step()
    write_evaluation(builder.run, 0, record(0, 0.5))
    write_evaluation(builder.run, 2, record(2, 0.75))
    return builder


def test_the_first_evaluation_of_a_step_stands(builder):
    write_evaluation(builder.run, 2, record(2, 0.1))
    assert read_evaluation(builder.run, 2)["sampled"]["accuracy"] == 0.75
    assert read_evaluation(builder.run, 1) is None


def test_evaluations_come_in_order_and_other_files_do_not_matter(builder):
    (builder.run.evaluations / "notes.json").write_text("{}")
    write_evaluation(builder.run, 9, record(9, 1.0))  # of a step that is not committed
    assert [one["step"] for one in read_evaluations(builder.run, 3)] == [0, 2]


def test_commits_are_chosen_by_number_or_word(builder):
    assert [choose_commit(builder.run, which).step for which in ("last", "best", "1", "0")] == [3, 2, 1, 0]


@pytest.mark.parametrize("which", ["4", "-1", "newest", "", "²"])
def test_a_step_that_is_none_is_refused_with_those_there_are(builder, which):
    with pytest.raises(ConfigError, match="0 to 3"):
        choose_commit(builder.run, which)


def test_without_evaluations_none_is_best(builder):
    shutil.rmtree(builder.run.evaluations)
    with pytest.raises(ConfigError, match="no evaluation"):
        choose_commit(builder.run, "best")


def test_the_best_of_a_run_is_the_best_that_is_committed(builder):
    write_evaluation(builder.run, 3, record(3, 0.75))
    write_evaluation(builder.run, 9, record(9, 1.0))
    assert choose_commit(builder.run, "best").step == 3


def test_a_run_without_commits_has_none_to_choose(tmp_path):
    with pytest.raises(ConfigError, match="no committed step"):
        choose_commit(RunFolder(tmp_path / "empty"), "last")


def test_a_missing_adapter_is_told_with_each_step_once(builder):
    shutil.copytree(builder.run.adapter(3, 1), builder.run.adapter(3, 2))  # an attempt that never committed
    commit = choose_commit(builder.run, "1")
    shutil.rmtree(builder.run.absolute(commit.adapter.path))
    with pytest.raises(ConfigError, match="adapters of steps 0, 2, 3 are there"):
        require_adapter(builder.run, commit)


def test_an_adapter_is_checked_before_it_is_used(builder):
    commit = choose_commit(builder.run, "2")
    folder = require_adapter(builder.run, commit)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    with pytest.raises(CorruptionError):
        require_adapter(builder.run, commit)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="adapters of steps 0, 1, 3 are there"):
        require_adapter(builder.run, commit)


def test_the_history_of_a_run_is_what_its_commits_and_evaluations_say(builder):
    rows = history(builder.run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row.get("evaluate/sampled/accuracy") for row in rows] == [0.5, None, 0.75, None]
    assert [row.get("reward/mean") for row in rows] == [None, 0.5, 0.5, 0.5]
    json.dumps(rows)
