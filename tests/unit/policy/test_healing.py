"""A rank is killed in the middle of a backward; its partner leaves the broken group and goes on with a new one."""

import signal
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import heal_process
import pytest

from argusrl.policy.policy import Policy


def hear(pipe: Connection) -> Any:
    """The next answer; EOFError where the rank is gone."""
    assert pipe.poll(timeout=100), "a rank does not answer"
    return pipe.recv()


def test_the_survivor_goes_on_bit_for_bit(processes: Any, settings: Any, rows: Any, tmp_path: Path) -> None:
    ranks, pipes = {}, {}
    for part in (heal_process.survive, heal_process.die, heal_process.replace):
        pipes[part], theirs = processes.Pipe()
        ranks[part] = processes.Process(target=part, args=(theirs, settings, rows, tmp_path / "checkpoint"))
        ranks[part].start()
        theirs.close()
    survivor = pipes[heal_process.survive]
    try:
        pipes[heal_process.die].send(hear(survivor))
        assert hear(survivor) == "RuntimeError"  # at once: the group's own deadline is 120 s
        ranks[heal_process.die].join(timeout=60)
        assert ranks[heal_process.die].exitcode == -signal.SIGKILL
        pipes[heal_process.replace].send(hear(survivor))
        undisturbed, survived, replaced = hear(survivor), hear(survivor), hear(pipes[heal_process.replace])
    finally:
        for process in ranks.values():
            process.kill()
            process.join()
    assert len(undisturbed) == 64
    assert survived == replaced == undisturbed


@pytest.mark.usefixtures("one_rank")
def test_nothing_of_a_closed_policy_stays(settings: Any, rows: Any, tmp_path: Path) -> None:
    gone: list[weakref.ref[Any]] = []
    for number in range(3):
        policy = Policy(settings)
        policy.forward_backward([rows], 18)
        policy.optimizer_step(1e-2)
        policy.seal_state()
        policy.save_checkpoint(tmp_path / str(number)).result(timeout=60)
        parts = [policy._scorer, policy._optimizer, *policy._scorer.parameters()]
        gone += [weakref.ref(part) for part in parts]
        del parts
        policy.close()  # the object itself lives on
        assert [ref() for ref in gone if ref() is not None] == []
