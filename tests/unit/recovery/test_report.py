from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

import fakes.run_folder
from argusrl.journal.attempts import Verdict, next_attempt, write_verdict
from argusrl.journal.commits import CommitChain, metrics_line
from argusrl.observe.phases import PhaseLog
from argusrl.recovery.goodput import BUCKETS
from argusrl.recovery.leftovers import read_leavings
from argusrl.recovery.report import find_faults, recovery_report, summary
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import append_line, encode_line
from fakes.run_folder import RunBuilder

ORIGIN = 1_800_000_000.0  # the first driver process starts


class Story:
    """A run folder whose clock is told: events, phases, verdicts and commits at seconds after ORIGIN."""

    def __init__(self, root: Path) -> None:
        self.builder = RunBuilder(root)
        self.run: RunFolder = self.builder.run
        self.attempt = 0

    def driver(self, at: float) -> None:
        self.attempt = next_attempt(self.run)
        self.event(at + 1, "attempt", attempt=self.attempt, started=ORIGIN + at)

    def event(self, at: float, kind: str, **fields: Any) -> None:
        time = datetime.fromtimestamp(ORIGIN + at, UTC).isoformat(timespec="milliseconds")
        append_line(self.run.events, {"time": time, "kind": kind, "message": kind, **fields})

    def shot(self, at: float, victim: str, member: str, number: int = 0, how: str = "kill") -> None:
        self.event(
            at, "shot", shot=number, point="training", victim=victim, member=member, how=how, attempt=self.attempt
        )

    def fault(self, at: float, kind: str, member: str, decision: str = "recover") -> None:
        self.event(at, "fault", fault=kind, member=member, how="died", decision=decision)

    def phase(self, at: float, phase: str, step: int, epoch: int = 1) -> None:
        line = {"time": ORIGIN + at, "phase": phase, "step": step, "epoch": epoch}
        with self.run.phases(self.attempt).open("ab") as file:
            file.write(encode_line(line))

    def end(self, at: float, outcome: str, code: int = 0) -> None:
        verdict = Verdict(outcome=outcome, exit_code=code, reason=outcome, step=0, time=ORIGIN + at)
        write_verdict(self.run, self.attempt, verdict)

    def commit(self, at: float) -> None:
        step = self.builder.head.step + 1
        journal = self.builder.journal(step)
        refs = [self.builder.play(journal, "p0", 0)]
        commit = self.builder.commit(step, [journal.seal()], refs)
        self.builder.chain.append(msgspec.structs.replace(commit, time=ORIGIN + at))


def undisturbed(story: Story) -> None:
    """Ten seconds of start, then steps of 2 + 1 + 1 s."""
    story.driver(0)
    story.phase(2, "start", 1)
    for step in (1, 2):
        begin = 10 + 4 * (step - 1)
        story.phase(begin, "rollout", step)
        story.phase(begin + 2, "train", step)
        story.phase(begin + 3, "sync", step)
        story.commit(begin + 4)
    story.end(18, "complete")


def test_an_undisturbed_run_has_a_cold_start_and_goodput_and_nothing_else(tmp_path: Path) -> None:
    story = Story(tmp_path)
    undisturbed(story)
    report = recovery_report(story.run)
    assert report.faults == ()
    assert report.cold_start_seconds == pytest.approx(14)
    assert (report.trajectories_lost, report.steps_lost) == (0, 0)
    seconds = {name: value for name, value in report.goodput.seconds.items() if value}
    assert seconds == pytest.approx({"start": 10, "rollout": 4, "train": 2, "sync": 2})
    assert report.goodput.share == pytest.approx(8 / 18)


def test_time_before_an_interruption_on_purpose_and_after_is_held_the_gap_is_not(tmp_path: Path) -> None:
    story = Story(tmp_path)
    undisturbed(story)
    story.driver(1000)
    story.end(1003, "interrupted", 75)
    goodput = recovery_report(story.run).goodput
    assert goodput.held_seconds == pytest.approx(18 + 3)
    assert goodput.seconds["start"] == pytest.approx(10 + 3)


def test_a_rank_fault_is_timed_from_its_shot_and_its_lost_work_is_not_goodput(tmp_path: Path) -> None:
    story = Story(tmp_path)
    undisturbed(story)
    story.attempt = next_attempt(story.run)
    story.event(21, "attempt", attempt=story.attempt, started=ORIGIN + 20)
    story.phase(22, "rollout", 3, epoch=1)  # this try fails: its commit is of epoch 2
    story.phase(24, "train", 3, epoch=1)
    story.shot(25, "rank", "rank 0")
    story.fault(26, "rank", "rank 0")
    story.phase(26, "start", 3, epoch=2)
    story.phase(30, "resume", 3, epoch=2)
    story.phase(31, "rollout", 3, epoch=2)
    story.phase(33, "train", 3, epoch=2)
    story.builder.reopen()
    story.commit(35)
    story.end(36, "complete")
    report = recovery_report(story.run)
    (fault,) = report.faults
    assert (fault.detect_seconds, fault.recover_seconds) == (pytest.approx(1), pytest.approx(10))
    lost = {name: report.goodput.seconds[name] for name in ("detection", "recovery", "replay", "repeated")}
    # The journal of epoch 1 has nothing of step 3, so that rollout (2 s) was for nothing, as was the training (1 s).
    assert lost == pytest.approx({"detection": 1, "recovery": 4, "replay": 1, "repeated": 3})
    assert report.goodput.held_seconds == pytest.approx(18 + 16)
    figures = summary([report])
    assert figures["recover_vs_cold_start"] == {"rank": pytest.approx(10 / 14, abs=1e-3)}
    assert figures["faults"] == {"rank": 1}


def test_a_killed_driver_is_found_by_its_verdict_and_the_gap_to_the_next_is_recovery(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.driver(0)
    story.phase(10, "rollout", 1)
    story.commit(14)
    story.shot(15, "driver", "driver")
    story.end(15.5, "killed", -9)
    story.driver(16)
    story.phase(20, "rollout", 2, epoch=2)
    story.builder.reopen()
    story.commit(23)
    story.end(23, "complete")
    report = recovery_report(story.run)
    (fault,) = report.faults
    assert (fault.kind, fault.decision) == ("driver", "restart_driver")
    assert (fault.detect_seconds, fault.recover_seconds) == (pytest.approx(0.5), pytest.approx(8))
    assert report.goodput.seconds["detection"] == pytest.approx(0.5)
    assert report.goodput.seconds["recovery"] == pytest.approx(0.5 + 4)


def test_while_one_of_two_engines_is_gone_half_of_the_rollout_is_lost_and_training_is_not(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.driver(0)
    story.phase(10, "rollout", 1)
    story.shot(12, "engine", "engine 1", number=3)
    story.run.rehearsal.mkdir()
    story.run.running_tokens(3).write_text("200")
    story.fault(13, "engine", "engine 1", decision="replace_engine")
    story.phase(16, "train", 1)
    story.event(20, "healed", member="engine 1", seconds=7.0, continued_tokens=190, engines=2)
    story.commit(22)
    story.end(22, "complete")
    report = recovery_report(story.run)
    seconds = {name: value for name, value in report.goodput.seconds.items() if value}
    assert seconds == pytest.approx(
        {"start": 10, "rollout": 6 - 0.5 - 1.5, "train": 6, "detection": 0.5, "recovery": 1.5}
    )
    assert summary([report])["tokens_salvaged"] == pytest.approx(0.95)


def test_shots_and_events_are_paired_by_member_and_what_nobody_shot_is_a_fault_too() -> None:
    def at(second: int, kind: str, **fields: Any) -> dict[str, Any]:
        return {"time": f"2027-01-01T00:00:{second:02d}+00:00", "kind": kind, **fields}

    def shot(second: int, member: str) -> dict[str, Any]:
        return at(second, "shot", victim="rank", member=member, how="kill", point="training", attempt=1)

    def fault(second: int, kind: str, member: str) -> dict[str, Any]:
        return at(second, "fault", fault=kind, member=member, how="died", decision="recover")

    events = [
        shot(1, "rank 0"),
        shot(1, "rank 1"),
        fault(2, "rank", "rank 1"),
        fault(5, "rank", "rank 0"),
        shot(6, "rank 0"),
        fault(8, "episode_worker", "episode worker 0"),
    ]
    records = find_faults(events, {}, [])
    assert [(record.member, record.detect_seconds) for record in records] == [
        ("rank 0", 4.0),
        ("rank 1", 1.0),
        ("rank 0", None),  # it fell together with another one
        ("episode worker 0", None),
    ]


def test_a_run_that_was_killed_from_outside_shows_it_without_any_shot(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.driver(0)
    story.end(9, "killed", -9)
    (fault,) = recovery_report(story.run).faults
    assert (fault.kind, fault.how, fault.detect_seconds) == ("driver", "killed", None)


def interrupted_step(builder: RunBuilder) -> tuple[list[Any], Any]:
    """Epoch 1 finishes two of the step's trajectories and dies; epoch 2 goes on with the step."""
    step = builder.head.step + 1
    journal = builder.journal(step)
    refs = [builder.play(journal, "p0", sample) for sample in range(2)]
    journal.sync()
    journal.abandon()
    builder.reopen()
    return refs, builder.journal(step)


def test_what_was_taken_over_is_kept(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    _, journal = interrupted_step(builder)
    adopted = journal.adopt(builder.head.adapter.sha256)
    commit = builder.chain.append(builder.commit(1, [journal.seal()], list(adopted.trajectories)))
    leavings = read_leavings(builder.run, CommitChain(builder.run), commit.step)
    assert (leavings.kept, leavings.lost, leavings.shares) == (2, 0, {1: 1.0})


def test_what_was_sampled_again_or_left_out_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = RunBuilder(tmp_path)
    _, journal = interrupted_step(builder)
    whole = fakes.run_folder.trajectory

    def slower(*arguments: Any, **options: Any) -> Any:
        return replace(whole(*arguments, **options), seconds=9.0)

    monkeypatch.setattr(fakes.run_folder, "trajectory", slower)
    again = builder.play(journal, "p0", 0)  # equal tokens, but another try; sample 1 is missing
    builder.chain.append(builder.commit(1, [journal.seal()], [again]))
    report = recovery_report(builder.run)
    assert (report.trajectories_lost, report.trajectories_kept) == (2, 0)


def test_a_commit_that_vanished_is_a_lost_step(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    for _ in range(2):
        builder.step()
    builder.run.commit(2).unlink()
    assert recovery_report(builder.run).steps_lost == 1


def test_the_durability_tax_adds_what_a_step_waits_for_storage(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    commit = builder.step()
    for seal in (0.01, 0.03):
        waits = {"rollout/seal_seconds": seal, "time/commit_seconds": 0.005, "time/checkpoint_seconds": 0.1}
        append_line(builder.run.metrics, metrics_line(commit) | waits)
    assert recovery_report(builder.run).tax_seconds == pytest.approx(0.125)


def test_several_runs_are_pooled(tmp_path: Path) -> None:
    stories = [Story(tmp_path / name) for name in "ab"]
    for story in stories:
        undisturbed(story)
    figures = summary([recovery_report(story.run) for story in stories])
    assert sum(figures["goodput_seconds"].values()) == pytest.approx(36)
    assert list(figures["goodput_seconds"]) == list(BUCKETS)
    assert json.dumps(figures)


def test_phases_survive_a_folder_that_is_gone(tmp_path: Path) -> None:
    PhaseLog(tmp_path / "missing" / "phases.jsonl").note("rollout", step=1, epoch=1)


def test_a_fault_that_another_one_met_is_left_out_of_the_medians(tmp_path: Path) -> None:
    story = Story(tmp_path)
    undisturbed(story)
    story.shot(20, "rank", "rank 0")
    story.fault(21, "rank", "rank 0")
    story.shot(22, "episode_worker", "episode worker 0")
    story.fault(23, "episode_worker", "episode worker 0")
    story.commit(30)
    story.shot(31, "rank", "rank 0")
    story.fault(32, "rank", "rank 0")
    story.commit(35)
    report = recovery_report(story.run)
    assert [fault.disturbed for fault in report.faults] == [True, True, False]
    assert summary([report])["recover_seconds"] == {"rank": {"median": 4.0, "worst": 4.0, "count": 1}}
    assert summary([report])["detect_seconds"]["rank"]["count"] == 2
