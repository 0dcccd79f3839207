from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from argusrl.errors import CorruptionError, FencedError
from argusrl.journal.epochs import claim_epoch, fence, newest_epoch
from argusrl.journal.submissions import (
    Made,
    NodeAction,
    NodeAnswer,
    Submission,
    SubmissionEnd,
    newest_submission,
    node_actions,
    read_answer,
    read_end,
    read_made,
    record_action,
    record_answer,
    record_end,
    record_made,
    record_submission,
    require_newest,
    submissions,
)
from argusrl.storage.layout import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "maze")


def intent(number: int, **fields: Any) -> Submission:
    values: dict[str, Any] = {
        "number": number, "name": f"maze-s{number}", "namespace": "default", "kind": "rayjob", "reason": "head_lost",
        "text": "", "time": 5.0, "manifest": {"spec": {}},
    }  # fmt: skip
    return Submission(**{**values, **fields})


def test_there_is_none_at_first(run):
    assert newest_submission(run) == 0
    assert submissions(run) == []


def test_the_first_intent_of_a_number_stands(run):
    first = record_submission(run, intent(1, reason="first"))
    assert record_submission(run, intent(1, reason="head_lost")) == first
    assert submissions(run) == [first]


def test_records_beside_an_intent_are_no_submissions(run):
    record_submission(run, intent(3))
    made = record_made(run, Made(number=3, uid="u", time=1.0))
    assert record_made(run, Made(number=3, uid="other", time=2.0)) == made == read_made(run, 3)
    end = record_end(run, SubmissionEnd(number=3, reason="complete", outcome="complete", text="", time=1.0))
    assert record_end(run, SubmissionEnd(number=3, reason="x", outcome="failed", text="", time=1.0)) == end
    assert read_end(run, 3) == end
    assert read_end(run, 2) is read_made(run, 2) is None
    assert newest_submission(run) == 3


def test_a_damaged_intent_is_noticed(run):
    record_submission(run, intent(1))
    run.submission(1).write_bytes(run.submission(1).read_bytes().replace(b"maze", b"maxe"))
    with pytest.raises(CorruptionError):
        submissions(run)


def test_one_action_for_one_fault(run):
    reboot = NodeAction(action="reboot", node="n", instance="i-1", reason="xid 74", time=1.0)
    assert record_action(run, reboot)
    assert not record_action(run, NodeAction(action="reboot", node="n", instance="i-1", reason="again", time=2.0))
    assert record_action(run, NodeAction(action="replace", node="n", instance="i-1", reason="again", time=3.0))
    record_answer(run, NodeAnswer(key=reboot.key, done=True))
    assert [action.action for action in node_actions(run)] == ["reboot", "replace"]
    assert read_answer(run, reboot.key) == NodeAnswer(key=reboot.key, done=True)
    assert read_answer(run, "replace-i-1") is None


class TestFence:
    def test_ends_the_driver_before_it(self, run):
        driver = claim_epoch(run)
        fence(run, 1, {"submission": 2})
        with pytest.raises(FencedError):
            driver.check()

    def test_again_finds_the_first_one_and_fences_nobody_who_came_after(self, run):
        claim_epoch(run)
        number = fence(run, 1, {"submission": 2})
        new_driver = claim_epoch(run)
        assert fence(run, 1, {"submission": 2}) == number
        new_driver.check()

    def test_goes_above_a_driver_that_healed_itself_meanwhile(self, run):
        claim_epoch(run)
        healed = claim_epoch(run)
        assert fence(run, 1, {"submission": 2}) == 3
        with pytest.raises(FencedError):
            healed.check()

    def test_is_never_in_a_gap_that_a_power_loss_left(self, run):
        claim_epoch(run)
        claim_epoch(run)
        last = claim_epoch(run)
        run.epoch(2).unlink()
        assert fence(run, 1, {"submission": 2}) == 4
        with pytest.raises(FencedError):
            last.check()

    def test_another_submission_has_another_fence(self, run):
        assert [fence(run, newest_epoch(run), {"submission": number}) for number in (2, 3)] == [1, 2]


class TestRequireNewest:
    def test_the_newest_may_go_on(self, run):
        record_submission(run, intent(1, reason="first"))
        record_submission(run, intent(2))
        require_newest(run, 2)

    def test_an_older_one_may_not(self, run):
        record_submission(run, intent(1, reason="first"))
        record_submission(run, intent(2))
        with pytest.raises(FencedError, match="submission 2, this is submission 1"):
            require_newest(run, 1)

    def test_without_records_everybody_may(self, run):
        require_newest(run, 1)

    def test_after_an_end_a_person_may_submit_under_any_number(self, run):
        record_submission(run, intent(1, reason="first"))
        record_submission(run, intent(2))
        record_end(run, SubmissionEnd(number=2, reason="vanished", outcome="stopped", text="", time=1.0))
        require_newest(run, 1)

    def test_what_a_person_submitted_may_carry_an_old_number(self, run):
        record_submission(run, intent(1, reason="first"))
        record_submission(run, intent(2))
        record_submission(run, intent(3, reason="person", name="maze-s1"))
        require_newest(run, 1)
