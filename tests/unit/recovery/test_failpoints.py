from __future__ import annotations

import threading
from pathlib import Path

import pytest

from argusrl.errors import ConfigError, CorruptionError
from argusrl.recovery.failpoints import Plan, Rehearsal, Shot, fired_shots, read_plan, write_plan
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import publish_file
from argusrl.storage.sealed_json import encode_sealed

RANK_IN_STEP_2 = Shot(point="training", step=2, victim="rank")


class Range:
    """Notes what is fired, and whether its marker was there by then."""

    def __init__(self, folder: RunFolder, *shots: Shot) -> None:
        self.folder = folder
        self.hits: list[tuple[int, bool]] = []
        self.hit = threading.Event()
        if shots:
            write_plan(folder, Plan(shots=shots))

    def fire(self, number: int, shot: Shot) -> None:
        self.hits.append((number, self.folder.shot(number).exists()))
        self.hit.set()

    def driver(self) -> Rehearsal:
        rehearsal = Rehearsal.of(self.folder, self.fire)
        assert rehearsal is not None
        return rehearsal


def test_an_ordinary_run_has_no_rehearsal(tmp_path: Path) -> None:
    assert Rehearsal.of(RunFolder(tmp_path), lambda number, shot: None) is None


def test_a_shot_waits_for_its_point_and_its_step(tmp_path: Path) -> None:
    targets = Range(RunFolder(tmp_path), RANK_IN_STEP_2)
    driver = targets.driver()
    driver.reached("training", 1)
    driver.reached("updated", 2)
    assert targets.hits == []
    driver.reached("training", 2)
    assert targets.hits == [(0, True)]  # its marker was durable first


def test_a_point_that_was_missed_is_shot_at_in_a_later_step(tmp_path: Path) -> None:
    targets = Range(RunFolder(tmp_path), Shot(point="replayed", step=2, victim="driver"))
    targets.driver().reached("replayed", 5)
    assert targets.hits == [(0, True)]


def test_no_shot_is_fired_twice_not_even_by_the_next_driver(tmp_path: Path) -> None:
    targets = Range(RunFolder(tmp_path), RANK_IN_STEP_2)
    first, rival = targets.driver(), targets.driver()
    for driver in (first, first, rival, targets.driver()):
        driver.reached("training", 2)
    assert targets.hits == [(0, True)]
    assert fired_shots(targets.folder, Plan(shots=(RANK_IN_STEP_2,))) == [0]


def test_a_late_shot_is_fired_from_another_thread_so_that_it_hits_what_the_driver_waits_for(tmp_path: Path) -> None:
    targets = Range(RunFolder(tmp_path), Shot(point="training", step=1, victim="rank", after_seconds=0.01))
    targets.driver().reached("training", 1)
    assert targets.hit.wait(10)
    assert targets.hits == [(0, True)]


def test_a_shot_whose_marker_cannot_be_written_is_not_fired(tmp_path: Path) -> None:
    targets = Range(RunFolder(tmp_path), RANK_IN_STEP_2)
    driver = targets.driver()
    targets.folder.rehearsal.write_text("a file where the folder should be")
    driver.reached("training", 2)
    assert targets.hits == []


def test_a_plan_comes_back_as_it_was_written_and_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    plan = Plan(shots=(RANK_IN_STEP_2, Shot(point="started", step=1, victim="driver", how="stop")), seed=7)
    write_plan(folder, plan)
    assert read_plan(folder) == plan
    with pytest.raises(FileExistsError):
        write_plan(folder, plan)


def test_a_damaged_or_foreign_plan_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    publish_file(folder.rehearsal_plan, encode_sealed({"shots": [{"point": "lunch", "step": 1, "victim": "rank"}]}))
    with pytest.raises(ConfigError, match="lunch"):
        read_plan(folder)
    folder.rehearsal_plan.write_bytes(folder.rehearsal_plan.read_bytes()[:-3])
    with pytest.raises(CorruptionError):
        read_plan(folder)
