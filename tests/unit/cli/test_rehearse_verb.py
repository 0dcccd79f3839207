from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from argusrl.cli import rehearse as verb
from argusrl.cli.main import run
from argusrl.cli.output import standard_output_aside
from argusrl.recovery.failpoints import read_plan
from argusrl.storage.layout import RunFolder
from fakes.run_folder import RunBuilder


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Path:
    values = {
        "run": {"name": "mine", "root": str(tmp_path / "runs")},
        "model": {"path": str(tiny_model)},
        "data": {"kind": "generated", "generator": "argusrl.data.shapes:prompt", "train_size": 64, "heldout_size": 8},
        "rewards": [{"kind": "exact"}],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


class Cluster:
    """Takes the place of the supervisor: notes what it was asked to run, and ends with the next code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *codes: int) -> None:
        self.codes = list(codes)
        self.runs: list[tuple[RunFolder, Any, bool]] = []
        monkeypatch.setattr("argusrl.recovery.supervisor.supervise", self.supervise)

    def supervise(self, folder: RunFolder, config: Any, **_: Any) -> int:
        self.runs.append((folder, config, read_plan(folder) is not None))
        return self.codes.pop(0)


OUTCOME = {
    "passed": True,
    "equivalent": 1.0,
    "differences": [],
    "problems": [],
    "timeline": [
        {
            "kind": "rank",
            "member": "rank 0",
            "how": "kill",
            "point": "training",
            "decision": "recover",
            "detect_seconds": 0.2,
            "recover_seconds": 11.1,
        }
    ],
    "trajectories_lost": 0,
    "trajectories_kept": 64,
    "steps_lost": 0,
    "tokens_salvaged": None,
    "cold_start_seconds": 50.0,
    "recover_seconds": {"rank": {"median": 11.1, "worst": 11.1, "count": 1}},
    "recover_vs_cold_start": {"rank": 0.222},
    "unique_goodput": 0.7,
    "unique_goodput_undisturbed": 0.8,
    "goodput_seconds": {"rollout": 70.0, "recovery": 30.0},
    "durability_tax": {"seconds_per_step": 0.027, "share_of_step": 0.01},
    "folders": {"undisturbed": "a", "under_fire": "b"},
}


def test_it_plays_an_undisturbed_and_a_shot_run_beside_the_users_own(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch, 0, 0)
    monkeypatch.setattr(verb, "judge", lambda calm, shot: OUTCOME)
    assert run(["rehearse", str(recipe), "--shots", "3"]) == 0
    assert [(folder.name, config.algorithm.num_steps, shot) for folder, config, shot in cluster.runs] == [
        ("mine-rehearsal-calm", 5, False),
        ("mine-rehearsal", 5, True),
    ]
    text = capsys.readouterr().out
    assert "rank 0" in text
    assert "22% of a cold start" in text
    assert "bit for bit" in text


def test_a_failed_rehearsal_says_why_and_ends_with_1(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Cluster(monkeypatch, 0, 9)
    outcome = {**OUTCOME, "passed": False, "equivalent": 0.5, "differences": ["step 3 differs in adapter"]}
    monkeypatch.setattr(verb, "judge", lambda calm, shot: outcome)
    assert run(["rehearse", str(recipe)]) == 1
    assert "step 3 differs in adapter" in capsys.readouterr().out


@pytest.mark.parametrize(("codes", "expected", "runs"), [((7,), 7, 1), ((75,), 75, 1), ((0, 75), 75, 2)])
def test_a_recipe_that_does_not_run_or_is_stopped_is_not_judged(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...], expected: int, runs: int
) -> None:
    cluster = Cluster(monkeypatch, *codes)
    assert run(["rehearse", str(recipe)]) == expected
    assert len(cluster.runs) == runs


def test_json_is_all_that_is_printed(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch, 0, 0)
    monkeypatch.setattr(verb, "judge", lambda calm, shot: OUTCOME)
    assert run(["rehearse", str(recipe), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recover_vs_cold_start"] == {"rank": 0.222}
    assert {config.observe.display for _, config, _ in cluster.runs} == {"none"}


def test_an_unknown_victim_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rehearse", str(recipe), "--faults", "engine,head"]) == 2
    assert "head" in capsys.readouterr().err


def test_the_judgement_of_equal_runs_passes_and_of_a_short_one_does_not(tmp_path: Path) -> None:
    calm, shot = RunBuilder(tmp_path / "calm"), RunBuilder(tmp_path / "shot")
    for builder in (calm, shot, calm):
        builder.step()
    outcome = verb.judge(calm.run, shot.run)
    assert (outcome["passed"], outcome["sound"]) == (False, False)
    shot.step()
    outcome = verb.judge(calm.run, shot.run)
    assert outcome["problems"] == []
    assert outcome["passed"]
    assert outcome["equivalent"] == 1.0


def test_what_children_print_does_not_get_into_the_json(capfd: pytest.CaptureFixture[str]) -> None:
    with standard_output_aside():
        subprocess.run(["echo", "noise"], check=True)
    subprocess.run(["echo", "answer"], check=True)
    assert capfd.readouterr() == ("answer\n", "noise\n")
