import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argusrl.algorithms.advantages import group_advantages

REWARDS = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=16)


def test_known_numbers() -> None:
    assert group_advantages([1, 0, 0, 0.5]) == pytest.approx([1.30557969, -0.78334782, -0.78334782, 0.26111594])
    assert group_advantages([1, 0, 0, 0.5], "group_mean") == [0.625, -0.375, -0.375, 0.125]


@pytest.mark.parametrize("kind", ["group_std", "group_mean"])
@pytest.mark.parametrize("rewards", [[], [3.0], [0.1] * 7])
def test_no_signal_is_exactly_zero(rewards: list[float], kind: str) -> None:
    assert group_advantages(rewards, kind) == [0.0] * len(rewards)


@given(REWARDS)
def test_advantages_are_centred_and_keep_the_order(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert all(advantages[a] <= advantages[b] for a, b in itertools.pairwise(order))


def test_the_driver_imports_no_torch_for_it() -> None:
    code = "import argusrl.algorithms.advantages, argusrl.algorithms.packing, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
