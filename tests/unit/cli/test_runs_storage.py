from __future__ import annotations

import json
import os
import time

import pytest

from argusrl.cli.main import run
from argusrl.cli.runs_storage import seconds_of
from argusrl.config.load import write_resolved
from argusrl.config.sections import Config
from argusrl.errors import ConfigError
from argusrl.journal.attempts import Heartbeat, Verdict, next_attempt, write_heartbeat, write_verdict
from argusrl.journal.verify import verify_run
from argusrl.storage.layout import RunFolder
from fakes.run_folder import RunBuilder, memory_folder

VALUES = {"model": {"path": "m"}, "data": {}, "rewards": [{"kind": "exact"}]}


@pytest.fixture
def root():
    with memory_folder() as folder:
        yield folder


def make_run(root, name="demo", steps=4, **checkpoint) -> RunFolder:
    """A finished run with real bytes, under a real config."""
    builder = RunBuilder(root / f".{name}")
    for _ in range(steps):
        builder.step()
    folder = RunFolder(root / name)
    builder.run.path.rename(folder.path)
    values = {**VALUES, "run": {"name": name}, "checkpoint": checkpoint}
    values["algorithm"] = {"num_steps": steps, "prompts_per_step": 1, "group_size": 2}
    folder.config.unlink()
    write_resolved(Config.model_validate(values), folder.config)
    attempt = next_attempt(folder)
    write_verdict(folder, attempt, Verdict(outcome="complete", exit_code=0, reason="", step=steps, time=time.time()))
    return folder


def answer(capsys, *words):
    assert run(["runs", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_du_tells_kinds_and_what_could_go(root, capsys):
    folder = make_run(root)
    (found,) = answer(capsys, "du", "--root", root)
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert found["bytes"] == sum(path.stat().st_size for path in files)
    assert found["files"] == len(files)
    assert found["kinds"]["adapters"]["files"] == 15
    assert 0 < found["gc"] < found["gc_least"] < found["bytes"]
    assert run(["runs", "du", str(folder.path)]) == 0
    text = capsys.readouterr().out
    assert "demo" in text
    assert "1 run, " in text


def test_gc_frees_what_du_said_and_the_run_stays_sound(root, capsys):
    folder = make_run(root)
    (before,) = answer(capsys, "du", root)
    planned = answer(capsys, "gc", root, "--dry-run")["runs"][0]
    assert planned["bytes"] == before["gc"]
    assert planned["retired"] == ["checkpoints/000001.e0001", "checkpoints/000002.e0001"]
    done = answer(capsys, "gc", root)["runs"][0]
    assert done == planned
    assert answer(capsys, "gc", root)["runs"][0]["bytes"] == 0
    least = ("--keep-checkpoints", 1, "--keep-adapters", 1, "--drop-trajectories")
    assert answer(capsys, "gc", folder.path, *least)["runs"][0]["bytes"] > 0
    assert verify_run(folder) == []
    assert run(["runs", "gc", "demo", "--root", str(root), "--dry-run"]) == 0
    assert "would free 0 B in all" in capsys.readouterr().out


def test_the_recipe_decides_where_nothing_else_is_said(root, capsys):
    make_run(root, keep=1, keep_trajectories=False)
    retired = answer(capsys, "gc", root, "--dry-run")["runs"][0]["retired"]
    assert "trajectories/000003" in retired
    kept = answer(capsys, "gc", root, "--dry-run", "--keep-trajectories")["runs"][0]["retired"]
    assert not [path for path in kept if path.startswith("trajectories")]


def test_young_and_running_runs_are_left_alone(root, capsys):
    make_run(root)
    assert answer(capsys, "gc", root, "--older-than", "1h")["runs"][0]["skipped"] == "too young"
    folder = RunFolder(root / "demo")
    attempt = next_attempt(folder)
    write_heartbeat(
        folder, attempt, Heartbeat(time=time.time(), pid=os.getpid(), host="h", epoch=1, step=1, phase="train")
    )
    assert answer(capsys, "gc", root)["runs"][0]["skipped"] == "it is being driven"
    assert answer(capsys, "du", root)[0]["gc"] is None


@pytest.mark.parametrize("words", [["du"], ["gc", "--dry-run"]])
def test_a_root_that_is_not_there_is_told(words, root, capsys):
    assert run(["runs", *words, "--root", str(root / "nope")]) == 2
    assert "nope: no such folder" in capsys.readouterr().err


def test_a_damaged_run_is_told_and_the_others_are_tidied(root, capsys):
    make_run(root, "a")
    broken = make_run(root, "b")
    broken.commit(2).write_bytes(b"{}")
    assert run(["runs", "gc", "--root", str(root), "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert first["bytes"] > 0
    assert "damaged" in second["skipped"]


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400), ("12h", 43_200), ("30d", 2_592_000), ("4w", 2_419_200)])
def test_durations(text, seconds):
    assert seconds_of(text) == seconds


def test_a_duration_without_a_unit_is_refused():
    with pytest.raises(ConfigError, match="not a duration"):
        seconds_of("30")
