from __future__ import annotations

import json
from pathlib import Path

import pytest

from argusrl.cli.main import run
from argusrl.cli.runs import find_run
from argusrl.config.load import write_resolved
from argusrl.config.sections import Config
from argusrl.errors import ConfigError
from argusrl.journal.attempts import Verdict, next_attempt, write_verdict
from argusrl.journal.commits import Commit, CommitChain
from argusrl.journal.epochs import claim_epoch
from argusrl.observe.events import EventLog
from argusrl.observe.sinks import rebuild
from argusrl.storage.layout import RunFolder
from argusrl.training.evaluation_file import write_evaluation
from argusrl.types import AdapterRef

ACCURACY = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "count": 10}


def make_run(root: Path, name: str, steps: int, total: int) -> RunFolder:
    """A run folder with commits, metrics, an evaluation and an attempt, but no bytes of adapters."""
    folder = RunFolder(root / name)
    folder.path.mkdir(parents=True)
    values = {"model": {"path": "m"}, "data": {}, "rewards": [{"kind": "exact"}], "algorithm": {"num_steps": total}}
    write_resolved(Config.model_validate({**values, "run": {"name": name}}), folder.config)
    epoch = claim_epoch(folder)
    chain = CommitChain(folder, epoch)
    rows = []
    for step in range(steps + 1):
        adapter = AdapterRef(
            version=step, epoch=epoch.number, path=f"adapters/v{step}", sha256="ab" * 32, file_sha256=""
        )
        metrics = {"reward/mean": step / 10, "time/rollout_seconds": 2.0, "time/step_seconds": 3.0} if step else {}
        outcome = "updated" if step else "initial"
        chain.append(
            Commit(step=step, epoch=epoch.number, outcome=outcome, adapter=adapter, state_digest="", metrics=metrics)  # type: ignore[arg-type]
        )
        if step:
            rows.append({"step": step, **metrics})
    rebuild(folder.metrics, rows)
    write_evaluation(folder, 0, {"step": 0, "metrics": {}, "greedy": ACCURACY, "sampled": ACCURACY})
    return folder


def end(folder: RunFolder, outcome: str, code: int) -> None:
    attempt = next_attempt(folder)
    write_verdict(folder, attempt, Verdict(outcome=outcome, exit_code=code, reason=f"it {outcome}", step=2))


def test_a_run_is_found_by_name_or_path_and_a_wrong_name_gets_a_suggestion(tmp_path: Path) -> None:
    make_run(tmp_path, "quickstart", 0, 2)
    assert find_run("quickstart", tmp_path).path == tmp_path / "quickstart"
    assert find_run(str(tmp_path / "quickstart"), Path("elsewhere")).path == tmp_path / "quickstart"
    with pytest.raises(ConfigError, match="did you mean quickstart"):
        find_run("quickstar", tmp_path)
    with pytest.raises(ConfigError, match="none"):
        find_run("x", tmp_path / "empty")


def test_show_tells_what_the_run_folder_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path, "demo", 3, 3)
    end(folder, "killed", -9)
    end(folder, "complete", 0)
    EventLog(folder.events).write("engine_failed", "engine 0 died")
    EventLog(folder.events).write("resume", "went on")
    assert run(["runs", "show", "demo", "--root", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["steps"], found["total"], found["finished"]) == ("demo", 3, 3, True)
    assert [attempt["outcome"] for attempt in found["attempts"]] == ["killed", "complete"]
    assert [fault["kind"] for fault in found["faults"]] == ["attempt_killed", "engine_failed"]
    assert found["adapter"]["version"] == 3
    assert found["adapter"]["sha256"] == "ab" * 32
    assert found["seconds_by_phase"] == {"rollout": 6.0}
    assert found["evaluations"] == [{"step": 0, "greedy": ACCURACY, "sampled": ACCURACY}]
    assert run(["runs", "show", "demo", "--root", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "steps     3 of 3" in text
    assert "sampled 0.500" in text


def test_list_tells_how_runs_stand_and_survives_a_damaged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end(make_run(tmp_path, "done", 2, 2), "complete", 0)
    end(make_run(tmp_path, "broken-off", 1, 5), "interrupted", 75)
    make_run(tmp_path, "new", 0, 5)
    damaged = make_run(tmp_path, "damaged", 0, 5)
    damaged.config.write_text(damaged.config.read_text().replace("num_steps: 5", "num_steps: 6"))
    (tmp_path / "not-a-run").mkdir()
    assert run(["runs", "list", "--root", str(tmp_path), "--json"]) == 0
    found = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    states = {name: entry["state"].partition(":")[0] for name, entry in found.items()}
    assert states == {"done": "finished", "broken-off": "interrupted", "new": "not started", "damaged": "damaged"}
    assert (found["broken-off"]["steps"], found["broken-off"]["total"]) == (1, 5)
    assert run(["runs", "list", "--root", str(tmp_path)]) == 0
    assert "broken-off" in capsys.readouterr().out


def test_verify_ends_with_6_and_the_list_when_something_is_broken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "demo", 1, 2)  # its adapters are missing
    assert run(["runs", "verify", "demo", "--root", str(tmp_path), "--json"]) == 6
    found = json.loads(capsys.readouterr().out)
    assert not found["sound"]
    assert any("adapters" in problem for problem in found["problems"])


def test_verify_accepts_a_sound_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "demo", 1, 2)
    monkeypatch.setattr("argusrl.journal.verify.verify_run", lambda folder: [])
    assert run(["runs", "verify", "demo", "--root", str(tmp_path)]) == 0
    assert "is sound" in capsys.readouterr().out
