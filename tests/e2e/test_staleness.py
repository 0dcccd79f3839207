"""`rollout.staleness: 1`: the next step is sampled while this one is trained, and faults change nothing of it."""

from __future__ import annotations

import pytest

from argusrl.journal.commits import CommitChain
from argusrl.journal.episodes import read_trajectory
from argusrl.journal.verify import verify_run
from argusrl.recovery.failpoints import Plan, Shot, fired_shots, write_plan
from argusrl.recovery.rehearse import compare_runs
from argusrl.storage.layout import RunFolder
from argusrl.training.step import reference_of
from e2e.conftest import SMALL

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

APART = ["cluster.colocate=false", "cluster.slots=2", "cluster.engines=1", "rollout.staleness=1"]
STEPS = [*SMALL, *APART, "algorithm.num_steps=6", "algorithm.updates_per_step=1", "evaluate.every_steps=3"]
SHOTS = (
    Shot(point="training", step=2, victim="engine"),  # while it samples step 3
    Shot(point="training", step=3, victim="rank"),
    Shot(point="updated", step=4, victim="episode_worker"),
    Shot(point="committing", step=5, victim="driver"),
)


@pytest.fixture(scope="module")
def undisturbed(train) -> RunFolder:
    return train("stale", *STEPS)


def test_every_step_is_sampled_under_the_adapter_of_exactly_one_step_before(undisturbed):
    chain = CommitChain(undisturbed)
    for step in range(1, 7):
        commit = chain.read(step)
        served = chain.read(max(0, step - 2)).adapter
        for number in range(len(commit.trajectories)):
            turns = read_trajectory(undisturbed, reference_of(commit, number)).turns
            assert {turn.adapter_sha256 for turn in turns} == {served.sha256}
    assert verify_run(undisturbed) == []


def test_faults_do_not_show_in_what_the_run_made(undisturbed, train, runs):
    plan = Plan(shots=SHOTS)
    write_plan(RunFolder(runs / "stale-shot"), plan)
    shot = train("stale-shot", *STEPS)
    assert len(fired_shots(shot, plan)) == len(SHOTS)
    assert compare_runs(undisturbed, shot).differences == ()
    assert verify_run(shot) == []
