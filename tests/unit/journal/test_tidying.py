import os
import time

import pytest

from argusrl.errors import CorruptionError, FencedError
from argusrl.journal import tidying
from argusrl.journal.attempts import Heartbeat, Verdict, next_attempt, write_heartbeat, write_verdict
from argusrl.journal.epochs import claim_epoch
from argusrl.journal.retention import is_retired
from argusrl.journal.tidying import Rules, last_sign_of_life, may_be_running, tidy, tidy_root
from argusrl.journal.usage import total, usage
from argusrl.journal.verify import verify_run
from argusrl.storage.publish import temporary_name
from fakes.run_folder import publish_adapter

LOOSE = Rules(keep_checkpoints=9, keep_adapters=9, keep_trajectories=True)
TIGHT = Rules(keep_checkpoints=1, keep_adapters=1, keep_trajectories=False, protected_versions={0, 2}, finished=True)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def files(run):
    return sorted(path.relative_to(run.path) for path in run.path.rglob("*"))


@pytest.fixture
def five(builder):
    for _ in range(5):
        builder.step()
    return builder


def begin(run, age_seconds=0.0):
    attempt = next_attempt(run)
    at = time.time() - age_seconds
    write_heartbeat(run, attempt, Heartbeat(time=at, pid=1, host="h", epoch=1, step=1, phase="rollout"))
    return attempt


def old(run, seconds=10_000.0):
    """Everything was last touched long ago."""
    for path in (run.path, *run.path.rglob("*")):
        os.utime(path, (time.time() - seconds,) * 2)


def test_a_finished_run_is_tidied_and_stays_sound(five):
    before = total(usage(five.run))
    done = tidy(five.run, TIGHT)
    assert names(five.run.checkpoints) == ["000005.e0001"]
    assert names(five.run.adapters) == ["v000000.e0001", "v000002.e0001", "v000005.e0001"]
    assert names(five.run.path / "trajectories") == []
    assert verify_run(five.run) == []
    assert all(is_retired(five.run, path) for path in done.retired)
    records = sum(path.stat().st_size for path in five.run.retired.iterdir())
    assert total(usage(five.run)).bytes == before.bytes - done.size.bytes + records
    assert done.size.files > 20


def test_a_dry_run_says_the_same_and_touches_nothing(five):
    abandoned = five.journal(6, "dead")
    five.play(abandoned, "p0", 0)
    abandoned.abandon()
    before = files(five.run)
    planned = tidy(five.run, TIGHT, dry_run=True)
    assert files(five.run) == before
    done = tidy(five.run, TIGHT)
    assert (planned.leavings, planned.retired, planned.size) == (done.leavings, done.retired, done.size)


def test_leavings_go_wherever_they_lie(five):
    run = five.run
    for path in (run.path / "metrics.jsonl", run.commit(3), run.checkpoint(4, 1)):
        temporary_name(path).write_bytes(b"half")
    temporary_name(run.adapter(4, 1)).mkdir()
    five.reopen()
    publish_adapter(run, 3, 2)  # of a driver that lost its step
    five.step()
    done = tidy(run, LOOSE)
    assert len(done.leavings) == 5
    assert not list(run.path.rglob(".*.tmp"))
    assert done.retired == []
    assert verify_run(run) == []


def test_what_a_restart_would_adopt_stays_until_the_run_is_finished(five):
    abandoned = five.journal(6, "dead")
    five.play(abandoned, "p0", 0)
    abandoned.abandon()
    publish_adapter(five.run, 6, 1)
    five.reopen()
    publish_adapter(five.run, 5, 2)
    assert tidy(five.run, LOOSE).leavings == []
    done = tidy(five.run, Rules(keep_checkpoints=9, keep_adapters=9, keep_trajectories=True, finished=True))
    assert sorted(done.leavings) == [
        "adapters/v000005.e0002",
        "adapters/v000006.e0001",
        "images/000006",
        "trajectories/000006",
    ]
    assert verify_run(five.run) == []


def test_a_run_under_way_is_left_alone(five):
    begin(five.run)
    before = files(five.run)
    with pytest.raises(FencedError):
        tidy(five.run, TIGHT)
    assert files(five.run) == before


def test_a_run_without_a_sign_of_life_is_not_under_way(five):
    begin(five.run, age_seconds=10_000)
    old(five.run)
    assert not may_be_running(five.run)
    assert last_sign_of_life(five.run) == pytest.approx(time.time() - 10_000, abs=60)
    assert tidy(five.run, TIGHT).retired


@pytest.mark.parametrize(("outcome", "running"), [("complete", False), ("interrupted", False), ("killed", True)])
def test_after_a_fault_a_supervisor_may_be_about_to_go_on(five, outcome, running):
    attempt = begin(five.run)
    write_verdict(five.run, attempt, Verdict(outcome=outcome, exit_code=1, reason="", time=time.time()))
    assert may_be_running(five.run) is running


def test_a_driver_that_comes_meanwhile_ends_it(five, monkeypatch):
    real, removed = tidying.size_of, []

    def size_of(path):
        removed.append(path)
        if len(removed) == 3:
            claim_epoch(five.run)
        return real(path)

    monkeypatch.setattr(tidying, "size_of", size_of)
    with pytest.raises(FencedError):
        tidy(five.run, TIGHT)
    assert len(removed) == 3
    assert verify_run(five.run) == []


def test_a_damaged_run_is_not_touched(five):
    five.run.commit(3).write_bytes(b"{}")
    before = files(five.run)
    with pytest.raises(CorruptionError):
        tidy(five.run, TIGHT)
    assert files(five.run) == before


def test_evidence_of_a_rehearsal_stays(five):
    abandoned = five.journal(3, "dead")
    five.play(abandoned, "p9", 0)
    abandoned.abandon()
    five.run.rehearsal_plan.write_bytes(b"{}")
    assert tidy(five.run, LOOSE).leavings == []
    five.run.rehearsal_plan.unlink()
    assert len(tidy(five.run, LOOSE).leavings) == 2


def test_old_probes_go_from_a_root(tmp_path):
    young, dead, other = (tmp_path / name for name in (".probe.1-a.tmp", ".probe.2-b.tmp", "run"))
    for folder in (young, dead, other):
        folder.mkdir()
        (folder / "file").write_bytes(b"12345")
    os.utime(dead, (0, 0))
    assert tidy_root(tmp_path, lambda _: False).bytes == 5
    assert tidy_root(tmp_path, lambda _: True).bytes == 5
    assert names(tmp_path) == [".probe.1-a.tmp", "run"]
