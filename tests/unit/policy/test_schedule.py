import subprocess
import sys

import pytest

from argusrl.config.sections import OptimizerSection
from argusrl.policy.schedule import learning_rate


def rates(section: OptimizerSection, steps: int, updates: int = 1) -> list[float]:
    return [
        learning_rate(section, step=step, update=update, updates_per_step=updates, num_steps=steps)
        for step in range(1, steps + 1)
        for update in range(updates)
    ]


def test_constant_after_warmup() -> None:
    section = OptimizerSection(learning_rate=1.0, warmup_steps=4)
    assert rates(section, 6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(("schedule", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_falls_from_the_peak_to_its_final_share(schedule: str, middle: float) -> None:
    section = OptimizerSection(learning_rate=1.0, schedule=schedule, final_share=0.1)
    values = rates(section, 11)
    assert values[0] == pytest.approx(1.0)
    assert values[5] == pytest.approx(middle)
    assert values[-1] == pytest.approx(0.1)
    assert values == sorted(values, reverse=True)


def test_a_longer_run_keeps_a_given_span() -> None:
    section = OptimizerSection(learning_rate=1.0, schedule="linear", schedule_steps=5)
    assert rates(section, 20)[:5] == rates(section, 5)
    assert rates(section, 20)[4:] == [0.0] * 16


def test_updates_of_a_step_follow_one_curve() -> None:
    section = OptimizerSection(learning_rate=1.0, schedule="linear", warmup_steps=1)
    values = rates(section, 3, updates=2)
    assert values == pytest.approx([0.5, 1.0, 1.0, 2 / 3, 1 / 3, 0.0])


def test_one_step_run_trains_at_the_peak() -> None:
    assert rates(OptimizerSection(learning_rate=1.0, schedule="cosine"), 1) == [1.0]


def test_the_driver_needs_no_torch_for_what_it_shares_with_ranks() -> None:
    modules = ", ".join(f"argusrl.policy.{name}" for name in ("rows", "schedule", "settings", "stats"))
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'transformers'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
