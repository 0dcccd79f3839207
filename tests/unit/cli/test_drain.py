"""The preStop hook: it asks, waits for the answer, and never for long where nobody answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from argusrl.cli import drain as verb
from argusrl.cli import main
from argusrl.journal import attempts, drains
from argusrl.journal.attempts import Heartbeat, Verdict, next_attempt, write_heartbeat, write_verdict
from argusrl.journal.drains import Drained, answer_drain, asked_pods, read_drain
from argusrl.journal.submissions import Submission, record_submission
from argusrl.storage.layout import RunFolder

POD = "maze-s1-worker-abcde"


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunFolder:
    """A run with a driver under way, and the environment of one of its pods."""
    folder = RunFolder(tmp_path / "maze")
    folder.path.mkdir()
    folder.config.write_text("run: {}\n")
    assert next_attempt(folder) == 1
    monkeypatch.setenv("ARGUSRL_RUN_FOLDER", str(folder.path))
    monkeypatch.setenv("POD_NAME", POD)
    monkeypatch.setenv("NODE_NAME", "hyperpod-i-0123")
    return folder


@pytest.fixture
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(drains, "DRAIN_SECONDS", 0.1)
    monkeypatch.setattr(verb, "_MARGIN_SECONDS", 0.05)
    monkeypatch.setattr(verb, "_POLL_SECONDS", 0.01)


def answering(run: RunFolder, **answer) -> threading.Thread:
    """A driver that answers the first wish."""

    def work() -> None:
        while not (wishes := asked_pods(run)):
            time.sleep(0.01)
        answer_drain(run, Drained(pod=next(iter(wishes)), **answer))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_it_asks_and_tells_what_became_of_it(run, capsys):
    driver = answering(run, outcome="drained", seconds=3.2, handed_over=7)
    assert main.run(["drain", "--wait", "--reason", "spot reclaim"]) == 0
    driver.join(5)
    assert f"{POD}: drained after 3.2 s, 7 unfinished trajectories go on elsewhere" in capsys.readouterr().out
    wish = read_drain(run, POD)
    assert (wish.node, wish.reason, wish.asked_by) == ("hyperpod-i-0123", "spot reclaim", "hook")
    assert asked_pods(run) == {POD: True}


def test_without_wait_it_only_asks(run, capsys):
    assert main.run(["drain", "--pod", "other", "--run", str(run.path)]) == 0
    assert "asked that other be left" in capsys.readouterr().out
    wish = read_drain(run, "other")
    assert (wish.asked_by, wish.node) == ("person", "")  # the node of this pod is not that of another one


def test_asking_twice_waits_for_the_same_answer(run):
    assert main.run(["drain"]) == 0
    first = read_drain(run, POD)
    answering(run, outcome="abandoned", seconds=27.0)
    assert main.run(["drain", "--wait"]) == 0
    assert read_drain(run, POD) == first


def test_nobody_answers(run, impatient, capsys):
    assert main.run(["drain", "--wait"]) == 11
    assert "no answer within" in capsys.readouterr().out


def test_a_run_that_ends_meanwhile_answers_nobody_and_is_not_waited_for(run, monkeypatch, capsys):
    def ends(*_: object) -> None:
        write_verdict(run, 1, Verdict(outcome="interrupted", exit_code=75, reason="stopped"))

    monkeypatch.setattr(verb.time, "sleep", ends)
    assert main.run(["drain", "--wait"]) == 0
    assert "the run has ended: interrupted" in capsys.readouterr().out


def test_a_driver_that_does_not_beat_answers_nobody(run, monkeypatch, capsys):
    monkeypatch.setattr(verb, "_SILENT_SECONDS", 0.02)
    monkeypatch.setattr(verb, "_POLL_SECONDS", 0.01)
    beat(run, 1)
    assert main.run(["drain", "--wait"]) == 11
    assert "the driver is silent" in capsys.readouterr().out


def test_pods_of_a_submission_that_is_fenced_have_nothing_to_hand_over(run, monkeypatch, capsys):
    fields = {"name": "maze-s2", "namespace": "default", "kind": "rayjob", "text": "", "time": 0.0, "manifest": {}}
    record_submission(run, Submission(number=2, reason="head_lost", **fields))
    monkeypatch.setenv("ARGUSRL_SUBMISSION", "1")
    assert main.run(["drain", "--wait"]) == 0
    assert "given to the cluster again as submission 2" in capsys.readouterr().out
    assert asked_pods(run) == {}


def test_storage_that_hangs_is_not_waited_for(run, impatient, monkeypatch, capsys):
    back = threading.Event()
    monkeypatch.setattr(attempts, "newest_attempt", lambda _: back.wait(30))
    monkeypatch.setattr(verb, "_MARGIN_SECONDS", -0.9)
    assert main.run(["drain", "--wait"]) == 11
    back.set()
    assert "does not answer" in capsys.readouterr().out


def test_storage_that_fails_is_told(run, capsys):
    run.drains.write_text("a file where the folder should be")
    assert main.run(["drain", "--wait"]) == 11
    assert "goes as it is" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["ARGUSRL_RUN_FOLDER", "POD_NAME"])
def test_outside_of_a_run_there_is_nothing_to_do(run, monkeypatch, missing, capsys):
    monkeypatch.delenv(missing)
    assert main.run(["drain", "--wait"]) == 0
    assert f"nothing to leave: {missing} is not set" in capsys.readouterr().out


def test_no_run_and_a_run_that_has_ended_are_nothing_to_leave(run, tmp_path, capsys):
    assert main.run(["drain", "--wait", "--run", str(tmp_path / "none")]) == 0
    write_verdict(run, 1, Verdict(outcome="complete", exit_code=0, reason="all steps"))
    assert main.run(["drain", "--wait"]) == 0
    assert "is not a run" in (out := capsys.readouterr().out)
    assert "no driver" in out
    assert asked_pods(run) == {}


def beat(run: RunFolder, pid: int) -> None:
    now = Heartbeat(time=time.time(), pid=pid, host=socket.gethostname(), epoch=1, step=3, phase="rollout")
    write_heartbeat(run, 1, now)


def test_a_driver_in_this_pod_is_stopped_by_a_signal_and_waited_for(run, capsys):
    code = "import signal, sys; signal.sigwait([signal.SIGTERM]); sys.exit(75)"
    driver = subprocess.Popen([sys.executable, "-c", code, "argusrl.training.driver"])
    while "argusrl.training.driver" not in verb._words(driver.pid):
        time.sleep(0.01)
    beat(run, driver.pid)
    reason = Verdict(outcome="interrupted", exit_code=75, reason="stopped")
    ended = threading.Thread(target=lambda: (driver.wait(20), write_verdict(run, 1, reason)), daemon=True)
    ended.start()
    assert main.run(["drain", "--wait"]) == 0
    assert driver.wait(5) in (75, -signal.SIGTERM)  # the signal may come before it waits for one
    assert "the driver sealed everything and stopped" in capsys.readouterr().out
    assert asked_pods(run) == {}


def test_the_signal_goes_to_the_supervisor_of_the_driver(run):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()', 'argusrl.training.driver'])"
    supervisor = subprocess.Popen([sys.executable, "-c", child, "train"], stdin=subprocess.PIPE)
    try:
        children: list[int] = []
        while not children:
            listed = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
            children = [int(pid) for pid in listed.read_text().split()]
            time.sleep(0.01)
        while "argusrl.training.driver" not in verb._words(children[0]):
            time.sleep(0.01)
        beat(run, children[0])
        assert verb._supervisor_of(attempts.read_heartbeat(run, 1), POD) == supervisor.pid
        assert verb._supervisor_of(attempts.read_heartbeat(run, 1), "another-pod") is None
    finally:
        supervisor.communicate(b"\n", timeout=10)


@pytest.mark.parametrize("change", [{"host": "another"}, {"time": 0.0}, {"pid": os.getpid()}])
def test_a_driver_elsewhere_of_before_or_of_something_else_is_left_alone(run, change):
    fields = {"time": time.time(), "pid": 1, "host": socket.gethostname(), "epoch": 1, "step": 0, "phase": "train"}
    assert verb._supervisor_of(Heartbeat(**(fields | change)), POD) is None
