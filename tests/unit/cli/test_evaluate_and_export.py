"""`argusrl evaluate` and `argusrl export`: what they choose and refuse before anything heavy happens."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import boto3
import pytest
from moto import mock_aws

from argusrl.cli.main import run
from argusrl.config.load import write_resolved
from argusrl.config.validate import validate
from fakes.run_folder import RunBuilder

ONE = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "successes": 5, "count": 10, "failed": 0, "mean_reward": 0.5}


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunBuilder:
    """Two committed steps; model and data of the recipe exist."""
    monkeypatch.chdir(tmp_path)
    builder = RunBuilder(tmp_path / "runs")
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "model").mkdir()
    values = {"model": {"path": str(tmp_path / "model")}, "data": {"train": str(tmp_path / "rows.jsonl")}}
    config = validate({**values, "rewards": [{"kind": "exact"}], "evaluate": {"every_steps": 0}})
    builder.run.config.unlink()
    write_resolved(config, builder.run.config)
    (tmp_path / "mine.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    for _ in range(2):
        builder.step()
    return builder


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list:
    """Evaluations and exports that would have been done, without the modules that import Ray and torch."""
    done: list = []

    def run_evaluation(job, say):
        done.append(job)
        say("starting engines")
        return {
            "base": {"greedy": ONE, "sampled": ONE},
            **({"adapter": {"greedy": ONE, "sampled": ONE}} if job.adapter else {}),
        }

    def export_run(folder, config, commit, to, *, merge):
        done.append((folder, commit.step, to, merge))
        to.mkdir()
        (to / "adapter_model.safetensors").write_bytes(b"weights")
        return {"step": commit.step, "adapter_sha256": commit.adapter.sha256, "largest_difference": 0.0}

    evaluation, export = ModuleType("evaluate_command"), ModuleType("export")
    evaluation.run_evaluation, evaluation.EvaluationJob = run_evaluation, SimpleNamespace
    export.export_run = export_run
    monkeypatch.setitem(sys.modules, "argusrl.training.evaluate_command", evaluation)
    monkeypatch.setitem(sys.modules, "argusrl.training.export", export)
    return done


def test_the_last_adapter_of_a_run_is_evaluated_against_its_base(builder, jobs, capsys):
    assert run(["evaluate", "run", "evaluate.samples=3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)  # nothing else on standard output
    assert (report["target"], report["adapter"]["greedy"]["count"]) == ("run", 10)
    (job,) = jobs
    assert (job.adapter, job.config.evaluate.samples, job.folder) == (builder.head.adapter, 3, builder.run)


def test_a_table_for_people(builder, jobs, capsys):
    assert run(["evaluate", "run", "--step", "1"]) == 0
    text = capsys.readouterr().out
    assert jobs[0].adapter.version == 1
    assert text.count("0.400 – 0.600") == 4
    assert "5/10" in text


def test_any_model_on_the_held_out_set_of_a_recipe(builder, jobs, tmp_path):
    (tmp_path / "other").mkdir()
    assert run(["evaluate", str(tmp_path / "other"), "--recipe", "mine.yaml"]) == 0
    assert (jobs[0].adapter, jobs[0].config.model.path) == (None, str(tmp_path / "other"))


@pytest.mark.parametrize("merge", [False, True])
def test_export_says_what_it_wrote_and_checked(builder, jobs, tmp_path, capsys, merge):
    to = tmp_path / "out"
    assert run(["export", "run", "--to", str(to), "--step", "1", *(["--merge"] if merge else [])]) == 0
    assert jobs == [(builder.run, 1, to, merge)]
    assert "loaded back" in capsys.readouterr().out


def test_an_export_goes_to_s3_once_it_was_checked(builder, jobs, monkeypatch, capsys):
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with mock_aws():
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="bucket")
        assert run(["export", "run", "--to", "s3://bucket/best", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["path"], report["sent_bytes"]) == ("s3://bucket/best", len(b"weights"))
        assert s3.get_object(Bucket="bucket", Key="best/adapter_model.safetensors")["Body"].read() == b"weights"
        assert run(["export", "run", "--to", "s3://nobody/best"]) == 7
    assert not jobs[0][2].exists(), "what was checked lay in a temporary folder"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "run", "--to", "s3://"], "not a place in S3"),
        (["evaluate", "ru"], "did you mean run"),
        (["evaluate", "run", "--step", "7"], "give 0 to 2"),
        (["evaluate", "run", "--step", "best"], "no evaluation"),
        (["evaluate", "run", "evaluate.sample=3"], "did you mean evaluate.samples"),
        (["evaluate", "./gone", "--recipe", "mine.yaml"], "model.path"),
        (["export", "ru", "--to", "out"], "did you mean run"),
        (["export", "run", "--to", "model"], "exists already"),
        (["export", "run", "--to", "out", "--step", "newest"], "give 0 to 2"),
        (["export", "run"], "--to"),
    ],
)
def test_mistakes_end_with_2_and_start_nothing(builder, jobs, capsys, words, said):
    assert run(words) == 2
    assert said in capsys.readouterr().err
    assert jobs == []


@pytest.mark.parametrize("verb", [["evaluate", "run"], ["export", "run", "--to", "out"]])
def test_an_adapter_that_is_gone_or_damaged_is_not_used(builder, jobs, capsys, verb):
    adapter = builder.run.absolute(builder.head.adapter.path)
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[::-1])
    assert run(verb) == 6
    shutil.rmtree(adapter)
    assert run(verb) == 2
    assert "adapters of steps 0, 1 are there" in capsys.readouterr().err
    assert jobs == []
