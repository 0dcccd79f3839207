"""What the benchmarks of memory make of their readings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import driver_memory
import growth

STEPS = [float(step) for step in range(1, 41)]


def test_a_steady_leak_is_found_whatever_single_readings_do():
    leaking = [1000.0 + 2.0 * step for step in STEPS]
    leaking[7] = leaking[30] = 50_000.0
    found = growth.grown(STEPS, leaking)
    assert found["per_step"] == pytest.approx(2.0)
    assert found["share_per_step"] == pytest.approx(2.0 / found["median"])
    assert driver_memory.median_slope(STEPS, leaking) == pytest.approx(2.0)


def test_what_only_jumps_once_in_a_while_does_not_grow():
    still = [1000.0 + 300.0 * (step % 10 == 0) for step in STEPS]
    assert growth.grown(STEPS, still)["share_per_step"] == 0.0


def test_least_squares_see_every_reading():
    assert driver_memory.slope(STEPS, [5.0 * step for step in STEPS]) == pytest.approx(5.0)
    assert driver_memory.slope([1.0], [3.0]) == 0.0


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("ray::EngineWorker.beat", "EngineWorker"),
        ("ray::w0.e0001.3:EpisodeWorker.play", "EpisodeWorker"),
        ("/x/python -m argusrl.training.driver /runs/a 1", "driver"),
        ("/x/python -m argusrl.cli.main train recipes/quickstart.yaml", "supervisor"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=y", "raylet"),
        ("/x/sleep 5 ", "/x/sleep 5"),
    ],
)
def test_processes_are_named_by_what_they_do(command, name):
    assert growth.name_of(command) == name


def test_this_process_can_be_read_and_one_that_is_gone_cannot():
    found = growth.reading(os.getpid())
    assert found is not None
    assert found["threads"] >= 1
    assert found["private_bytes"] > 1 << 20
    assert growth.reading(2**22 + 1) is None
