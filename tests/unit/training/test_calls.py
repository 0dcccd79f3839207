"""Faults of workers, with futures in place of Ray's references."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from argusrl.errors import AdapterRefused, DeadlineError, StorageError, WorkerError, WorkerLost
from argusrl.training import calls
from argusrl.training.calls import call, call_all


def of_worker(cause: Exception) -> Exception:
    """What awaiting a call raises after the worker raised `cause`."""
    return RayTaskError("method", "Traceback: …", cause).as_instanceof_cause()


async def raises(error: Exception):
    raise error


def outcome(error: Exception, deadline_seconds: float = 5.0):
    return asyncio.run(call(raises(error), deadline_seconds, "publish", "rank 0"))


@pytest.mark.parametrize("own", [AdapterRefused("digest 1 is not 2", "see"), StorageError("disk full")])
def test_a_workers_own_error_stays_what_it_is(own):
    with pytest.raises(type(own)) as raised:
        outcome(of_worker(own))
    assert (raised.value.message, raised.value.hint) == (own.message, own.hint)


def test_what_several_tasks_of_a_worker_raised_is_the_first_of_them():
    with pytest.raises(StorageError, match="disk full"):
        outcome(of_worker(ExceptionGroup("tasks", [StorageError("disk full"), ValueError("x")])))


def test_a_bug_in_a_worker_is_named():
    with pytest.raises(WorkerError, match=r"rank 0 failed in publish: KeyError: 'a'"):
        outcome(of_worker(KeyError("a")))


def test_a_timeout_inside_a_worker_is_not_a_worker_that_hangs():
    with pytest.raises(WorkerError, match="TimeoutError: no space in the queue"):
        outcome(of_worker(TimeoutError("no space in the queue")))


def test_a_worker_that_died_is_a_worker_error():
    with pytest.raises(WorkerError, match=r"rank 0 died \(publish\)"):
        outcome(ActorDiedError())


def test_a_worker_that_hangs_meets_the_deadline():
    with pytest.raises(DeadlineError, match="rank 0 did not answer"):
        asyncio.run(call(asyncio.sleep(3600), 0.02, "publish", "rank 0"))


def test_all_answers_come_in_order_and_the_first_fault_wins(monkeypatch):
    monkeypatch.setattr(calls, "SETTLE_SECONDS", 0.05)

    async def after(seconds: float, value: int) -> int:
        await asyncio.sleep(seconds)
        return value

    assert asyncio.run(call_all([after(0.02, 1), after(0, 2)], 5.0, "x", ["rank 0", "rank 1"])) == [1, 2]
    with pytest.raises(WorkerError, match="rank 1 failed in x"):
        asyncio.run(call_all([after(3600, 1), raises(of_worker(ValueError("bad")))], 5.0, "x", ["rank 0", "rank 1"]))


def test_the_death_of_a_worker_explains_the_faults_of_the_others():
    async def late(error: Exception):
        await asyncio.sleep(0.01)
        raise error

    both = [raises(of_worker(RuntimeError("Connection reset by peer"))), late(ActorDiedError())]
    with pytest.raises(WorkerLost, match="rank 1 died") as raised:
        asyncio.run(call_all(both, 5.0, "update", ["rank 0", "rank 1"]))
    assert raised.value.member == "rank 1"
