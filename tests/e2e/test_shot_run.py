"""Every kind of process is lost once in one run, and the run ends as the undisturbed one."""

from __future__ import annotations

import pytest

from argusrl.journal.commits import CommitChain
from argusrl.journal.verify import verify_run
from argusrl.observe.events import read_events
from argusrl.recovery.failpoints import Plan, Shot, fired_shots, write_plan
from argusrl.recovery.rehearse import compare_runs
from argusrl.recovery.report import recovery_report, summary
from argusrl.storage.layout import RunFolder
from e2e.conftest import SMALL

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

STEPS = [*SMALL, "algorithm.num_steps=6", "evaluate.every_steps=0"]
SHOTS = (
    Shot(point="rollout_half", step=2, victim="engine"),
    Shot(point="training", step=3, victim="rank", after_seconds=0.05),
    Shot(point="rollout_begun", step=4, victim="episode_worker"),
    Shot(point="committing", step=5, victim="driver"),
    Shot(point="attached", step=5, victim="rank"),  # in the middle of the recovery from the one before
)


@pytest.fixture(scope="module")
def undisturbed(train) -> RunFolder:
    return train("six-steps", *STEPS)


@pytest.fixture(scope="module")
def shot(train, runs) -> RunFolder:
    write_plan(RunFolder(runs / "shot"), Plan(shots=SHOTS))
    return train("shot", *STEPS)


def test_every_shot_was_fired_and_found(shot):
    assert len(fired_shots(shot, Plan(shots=SHOTS))) == len(SHOTS)
    kinds = {event["fault"] for event in read_events(shot.events) if event["kind"] == "fault"}
    assert kinds >= {"engine", "rank", "episode_worker"}
    epochs = [CommitChain(shot).read(step).epoch for step in range(7)]
    assert epochs == sorted(epochs)
    assert epochs[-1] > epochs[0]


def test_nothing_shows_in_what_the_run_made(undisturbed, shot):
    comparison = compare_runs(undisturbed, shot)
    assert comparison.differences == ()
    assert comparison.equivalent == 1.0
    assert verify_run(shot) == []


def test_the_report_says_that_nothing_was_lost(shot):
    found = summary([recovery_report(shot)])
    assert (found["trajectories_lost"], found["steps_lost"]) == (0, 0)
    assert found["unique_goodput"] > 0
    assert found["faults"] == {"engine": 1, "rank": 2, "episode_worker": 1, "driver": 1}
    assert set(found["recover_seconds"]) >= {"engine", "rank", "episode_worker"}  # the driver's was shot at, too
