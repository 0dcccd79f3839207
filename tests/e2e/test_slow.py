"""What is slow and makes progress is left alone, however short the deadline for silence is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from argusrl.journal.verify import verify_run
from e2e.started import REAL_FAULTS, Started, injected, same_end
from e2e.test_train import driver_of

pytestmark = REAL_FAULTS
HANG = "recovery.hang_seconds=8"
HERE = Path(__file__).parent


def test_a_tool_that_takes_longer_than_anything_may_be_silent(runs):
    tool = f"{{kind: python, factory: '{HERE / 'user_code.py'}:SlowTool', options: {{seconds: 20}}, processes: 8}}"
    run = Started(
        runs,
        "slow-tool",
        f"environment={tool}",
        "rewards=[{kind: environment}]",
        "algorithm.num_steps=1",
        "algorithm.prompts_per_step=2",
        "evaluate.every_steps=0",
        HANG,
    )
    assert run.end() == 0, run.log.read_text()
    assert not run.events("fault")
    assert run.folder.commit(1).exists()
    assert verify_run(run.folder) == []


@contextmanager
def slowed(processes: list[psutil.Process], factor: float = 10.0) -> Iterator[None]:
    """They get one tenth of the time, in slices."""
    ended = threading.Event()

    def slow() -> None:
        pause = 0.05
        while not ended.is_set():
            with suppress(psutil.NoSuchProcess):
                for process in processes:
                    process.suspend()
                ended.wait(pause * (factor - 1))
                for process in processes:
                    process.resume()
            ended.wait(pause)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_worker_ten_times_slower_is_no_fault_and_a_slow_disk_is_none(calm, runs):
    run = Started(runs, "slow", HANG)
    for step, kind in enumerate(["EngineWorker", "RankWorker"], start=1):
        run.until(lambda step=step: run.playing(step))
        with slowed(run.workers(kind)):
            run.until(run.folder.commit(step).exists)
    run.until(lambda: run.playing(3))
    writers = [driver_of(run.process), *run.workers("RankWorker"), *run.workers("EpisodeWorker")]
    with injected([process.pid for process in writers], "delay_enter=1500000"):
        run.until(run.folder.commit(3).exists)
    assert run.end() == 0, run.log.read_text()
    assert not run.events("fault")
    assert same_end(run.folder, calm)
