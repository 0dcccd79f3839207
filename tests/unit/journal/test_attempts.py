import pytest

from argusrl.errors import CorruptionError
from argusrl.journal.attempts import (
    Heartbeat,
    Verdict,
    checked_verdict,
    newest_attempt,
    next_attempt,
    read_heartbeat,
    read_verdict,
    write_heartbeat,
    write_verdict,
)


def test_attempts_are_claimed_one_by_one(run):
    assert newest_attempt(run) == 0
    assert [next_attempt(run), next_attempt(run)] == [1, 2]
    assert newest_attempt(run) == 2
    assert (run.attempt(2) / "logs").is_dir()


def test_the_first_verdict_stands(run):
    attempt = next_attempt(run)
    assert read_verdict(run, attempt) is None
    first = Verdict(outcome="killed", exit_code=137, reason="out of memory", step=4, details={"signal": 9})
    assert write_verdict(run, attempt, first) == first
    assert write_verdict(run, attempt, Verdict(outcome="complete", exit_code=0, reason="done")) == first
    assert read_verdict(run, attempt) == first
    assert not first.complete


def test_a_damaged_verdict_is_corruption_and_says_only_that_the_attempt_ended(run):
    attempt = next_attempt(run)
    write_verdict(run, attempt, Verdict(outcome="complete", exit_code=0, reason="done"))
    path = run.attempt(attempt) / "verdict.json"
    path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))
    with pytest.raises(CorruptionError):
        checked_verdict(run, attempt)
    left = read_verdict(run, attempt)
    assert (left.outcome, left.complete) == ("killed", False)
    assert "verdict.json" in left.reason


def test_the_heartbeat_is_replaced_in_place(run):
    attempt = next_attempt(run)
    assert read_heartbeat(run, attempt) is None
    for step in (1, 2):
        beat = Heartbeat(time=float(step), pid=7, host="h", epoch=1, step=step, phase="rollout")
        write_heartbeat(run, attempt, beat)
        assert read_heartbeat(run, attempt) == beat
    (run.attempt(attempt) / "heartbeat.json").write_bytes(b"\x00garbage")
    assert read_heartbeat(run, attempt) is None
    assert sorted(path.name for path in run.attempt(attempt).iterdir()) == ["heartbeat.json", "logs"]
