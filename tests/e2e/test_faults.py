"""Faults of the real stack that a user meets first; many more are under `make test-faults`."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from argusrl.journal.verify import verify_run
from argusrl.observe.events import read_events
from e2e.started import Started, only_in_test_faults, same_end
from e2e.test_train import driver_of

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_run_folder_that_goes_away_and_comes_back(calm, runs):
    run = Started(runs, "gone")
    run.until(lambda: run.playing(1))
    run.folder.path.rename(runs / "away")
    time.sleep(3.0)
    assert not run.folder.path.exists()  # nothing was put in its place
    (runs / "away").rename(run.folder.path)
    run.until(run.folder.commit(2).exists)
    run.folder.path.rename(runs / "away")
    time.sleep(3.0)
    assert not run.folder.path.exists()
    (runs / "away").rename(run.folder.path)
    assert run.end() == 0, run.log.read_text()
    assert "waiting" in run.kinds()
    assert verify_run(run.folder) == []
    assert same_end(run.folder, calm)


def test_two_drivers_of_one_run_make_one_history(calm, runs):
    run = Started(runs, "two")
    run.until(lambda: run.playing(1))
    paused = [psutil.Process(run.process.pid), driver_of(run.process)]
    for process in paused:
        process.suspend()
    first, run.process = run.process, run.start()
    run.until(run.folder.commit(2).exists)
    for process in paused:
        process.resume()
    assert [run.end(first), run.end()] == [8, 0], run.log.read_text()
    assert "another argusrl train drives this run now" in run.log.read_text()
    assert verify_run(run.folder) == []
    assert same_end(run.folder, calm)


def test_signals_twice_in_a_rollout_keep_what_was_played(calm, runs):
    run = Started(runs, "signals")
    run.until(lambda: run.playing(2, size=20_000))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        os.kill(run.process.pid, number)
        time.sleep(0.05)
    assert run.end() == 75, run.log.read_text()
    assert verify_run(run.folder) == []
    assert run.end(run.start()) == 0, run.log.read_text()
    (adopted,) = [event for event in read_events(run.folder.events) if event["kind"] == "adopted"]
    assert adopted["trajectories"] + adopted["unfinished"] > 0
    assert verify_run(run.folder) == []
    assert same_end(run.folder, calm)


@only_in_test_faults
def test_two_commands_at_once_on_a_new_name_make_one_history(calm, runs):
    run = Started(runs, "at-once")
    ends = {run.end(run.start()), run.end()}
    assert ends == {0, 8}, run.log.read_text()
    assert verify_run(run.folder) == []
    assert same_end(run.folder, calm)


@only_in_test_faults
@pytest.mark.parametrize(
    ("victim", "number"),
    [("EngineWorker", signal.SIGTERM), ("RankWorker", signal.SIGINT), ("EpisodeWorker", signal.SIGTERM)],
)
def test_signals_in_the_middle_of_a_recovery(calm, runs, victim, number):
    run = Started(runs, f"healing-{victim}", "recovery.standby_engines=0")
    run.until(lambda: run.playing(2))
    run.workers(victim)[0].kill()
    run.until(lambda: run.events("fault"))
    for _ in range(2):
        os.kill(run.process.pid, number)
        time.sleep(0.3)
    assert run.end() == 75, run.log.read_text()
    assert run.verdict().outcome == "interrupted"  # by itself, within the time that it has
    assert verify_run(run.folder) == []
    assert run.resume() == 0, run.log.read_text()
    assert verify_run(run.folder) == []
    assert same_end(run.folder, calm)
