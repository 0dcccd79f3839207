from __future__ import annotations

from pathlib import Path

import pytest

from argusrl.config.sections import Config
from argusrl.recovery.failpoints import RECOVERY_POINTS, STEP_POINTS, VICTIMS
from argusrl.recovery.rehearse import compare_runs, draw_plan, rehearsed
from fakes.run_folder import RunBuilder

CONFIG = Config.model_validate({"model": {"path": "m"}, "data": {}, "rewards": [{"kind": "exact"}]})


def test_a_plan_is_the_same_for_a_seed_and_another_for_the_next() -> None:
    assert draw_plan(VICTIMS, 6, seed=1) == draw_plan(VICTIMS, 6, seed=1)
    assert draw_plan(VICTIMS, 6, seed=1) != draw_plan(VICTIMS, 6, seed=2)


def test_every_victim_has_its_turn_and_every_step_one_shot() -> None:
    shots = draw_plan(VICTIMS, 8, seed=3).shots
    assert [shot.step for shot in shots] == list(range(2, 10))
    assert {victim: sum(shot.victim == victim for shot in shots) for victim in VICTIMS} == dict.fromkeys(VICTIMS, 2)
    assert all(shot.point in STEP_POINTS and shot.how == "kill" for shot in shots)


@pytest.mark.parametrize("seed", range(20))
def test_second_faults_meet_a_recovery_and_never_the_same_kind_of_victim_twice(seed: int) -> None:
    shots = draw_plan(VICTIMS, 6, seed, second_faults=2).shots
    first = {shot.step: shot.victim for shot in shots[:6]}
    assert len(shots) == 8
    for shot in shots[6:]:
        assert shot.point in RECOVERY_POINTS
        assert first[shot.step] not in ("engine", shot.victim)  # an engine is replaced without a recovery


def test_a_rehearsal_is_as_long_as_its_shots_need_and_evaluates_nothing() -> None:
    config = rehearsed(CONFIG, shots=4, name="mine-rehearsal")
    assert (config.algorithm.num_steps, config.evaluate.every_steps, config.run.name) == (6, 0, "mine-rehearsal")
    assert config.optimizer == CONFIG.optimizer


def runs(root: Path, steps: int = 2) -> tuple[RunBuilder, RunBuilder]:
    both = RunBuilder(root / "calm"), RunBuilder(root / "shot")
    for builder in both:
        for _ in range(steps):
            builder.step()
    return both


def test_equal_runs_are_equivalent_whoever_drove_them(tmp_path: Path) -> None:
    calm, shot = runs(tmp_path)
    shot.reopen()
    calm.step()
    shot.step()
    comparison = compare_runs(calm.run, shot.run)
    assert (comparison.steps, comparison.equivalent, comparison.differences) == (4, 1.0, ())


def test_a_reward_that_differs_and_a_missing_step_are_told(tmp_path: Path) -> None:
    calm, shot = runs(tmp_path)
    journal = shot.journal(3)
    shot.chain.append(shot.commit(3, [journal.seal()], []))
    calm.step()
    calm.step()
    comparison = compare_runs(calm.run, shot.run)
    assert comparison.equivalent == 3 / 5
    assert comparison.differences == (
        "step 3 differs in trajectories",
        "step 4 is committed in one of the two runs only",
    )
