from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from argusrl.errors import EngineError, WorkerError, WorkerLost
from argusrl.rollout.stepping import SteppingThread


class Machine:
    """Counts its steps; a step waits for a permit so that tests decide when one happens."""

    def __init__(self) -> None:
        self.work = 0
        self.steps: list[int] = []
        self.permits = threading.Semaphore(0)
        self.fault: Exception | None = None
        self.failures: list[WorkerError] = []
        self.thread = SteppingThread(
            step=self.step, busy=lambda: self.work > 0, failed=self.failures.append, name="machine"
        )

    def step(self) -> None:
        assert self.permits.acquire(timeout=10)
        if self.fault:
            raise self.fault
        self.work -= 1
        self.steps.append(threading.get_ident())

    def add(self, work: int) -> Future[Any]:
        return self.thread.submit(lambda: setattr(self, "work", work))


@pytest.fixture
def machine() -> Any:
    machine = Machine()
    yield machine
    machine.permits.release(100)
    machine.thread.stop()


def test_operations_run_in_order_on_the_thread_that_steps(machine: Machine) -> None:
    seen: list[int] = []
    futures = [machine.thread.submit(lambda n=n: seen.append(n) or threading.get_ident()) for n in range(5)]
    machine.add(1).result(10)
    machine.permits.release()
    identities = {future.result(10) for future in futures}
    machine.thread.submit(lambda: None).result(10)
    assert seen == [0, 1, 2, 3, 4]
    assert identities == set(machine.steps)


def test_operations_get_their_turn_between_two_steps(machine: Machine) -> None:
    machine.add(3).result(10)
    machine.permits.release()
    assert machine.thread.submit(lambda: len(machine.steps)).result(10) in (0, 1)
    machine.permits.release(2)


def test_an_operation_that_raises_costs_only_itself(machine: Machine) -> None:
    with pytest.raises(ZeroDivisionError):
        machine.thread.submit(lambda: 1 / 0).result(10)
    assert machine.thread.submit(lambda: "alive").result(10) == "alive"
    assert machine.failures == []


def test_a_cancelled_operation_is_not_run(machine: Machine) -> None:
    machine.add(1).result(10)  # the thread is in a step now and takes nothing from the queue
    ran: list[int] = []
    future = machine.thread.submit(lambda: ran.append(1))
    assert future.cancel()
    machine.permits.release()
    machine.thread.submit(lambda: None).result(10)
    assert ran == []


def test_a_step_that_raises_ends_everything_with_its_reason(machine: Machine) -> None:
    machine.fault = MemoryError("no room")
    machine.add(1).result(10)
    waiting = machine.thread.submit(lambda: None)
    machine.permits.release()
    with pytest.raises(WorkerLost, match="MemoryError: no room"):
        waiting.result(10)
    with pytest.raises(WorkerLost, match="no room"):
        machine.thread.submit(lambda: None).result(10)
    machine.thread.stop()
    assert [error.__cause__ for error in machine.failures] == [machine.fault]


def test_stop_runs_what_is_queued_and_refuses_what_comes_later(machine: Machine) -> None:
    future = machine.thread.submit(lambda: "done")
    machine.thread.stop()
    assert future.result(0) == "done"
    with pytest.raises(EngineError, match="closed"):
        machine.thread.submit(lambda: None).result(0)
