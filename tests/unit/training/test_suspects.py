"""Samples that end their step are told apart by evidence, not by one coincidence."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from argusrl.errors import NumericsError
from argusrl.journal.quarantine import QUARANTINED, quarantined
from argusrl.storage.layout import RunFolder
from argusrl.training.suspects import Suspects
from argusrl.types import TrajectoryKey


@pytest.fixture
def run(tmp_path):
    said = []
    return SimpleNamespace(
        folder=RunFolder(tmp_path),
        epoch=SimpleNamespace(number=4),
        workers=SimpleNamespace(position=SimpleNamespace(step=7), ranks=SimpleNamespace(names=["rank 0", "rank 1"])),
        isolated_step=None,
        config=SimpleNamespace(
            algorithm=SimpleNamespace(prompts_per_step=2, group_size=4), rollout=SimpleNamespace(max_failed_share=0.25)
        ),
        say=lambda kind, message, **fields: said.append((kind, fields)),
        said=said,
    )


def note(run, rank: int, *keys: str, epoch: int = 4, step: int = 7) -> None:
    path = run.folder.suspect(rank)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"epoch": epoch, "step": step, "keys": keys}))


def test_a_rank_that_died_twice_in_the_same_samples_may_be_chance(run):
    note(run, 1, "a/0", "a/1")
    suspects = Suspects(run)
    assert [suspects.accused_by_death("rank 1") for _ in range(2)] == ["", ""]
    assert "a/0" in suspects.accused_by_death("rank 1")


def test_once_samples_are_alone_one_death_says_enough(run):
    note(run, 0, "a/1")
    suspects = Suspects(run)
    suspects.isolate()
    assert suspects.accused_by_death("rank 0") == "a/1"


@pytest.mark.parametrize("changes", [{"epoch": 3}, {"step": 6}])
def test_what_a_rank_computed_at_another_time_says_nothing(run, changes):
    note(run, 0, "a/1", **changes)
    suspects = Suspects(run)
    suspects.isolate()
    assert suspects.accused_by_death("rank 0") == ""


def test_other_workers_and_torn_notes_say_nothing(run):
    suspects = Suspects(run)
    suspects.isolate()
    assert suspects.accused_by_death("engine 0") == ""
    assert suspects.accused_by_death("rank 0") == ""
    note(run, 0, "a/1")
    run.folder.suspect(0).write_text('{"epoch": 4, "st')
    assert suspects.accused_by_death("rank 0") == ""


def test_only_a_single_sample_is_left_out(run):
    suspects = Suspects(run)
    suspects.accuse(("a/0", "a/1"))
    suspects.leave_out("it broke the step")
    assert quarantined(run.folder, 7) == []
    suspects.accuse(("data/7/1",))
    suspects.leave_out("it broke the step")
    (failure,) = quarantined(run.folder, 7)
    assert (failure.key, failure.kind) == (TrajectoryKey(7, "data/7", 1), QUARANTINED)
    assert run.said[0][0] == "quarantined"
    assert quarantined(run.folder, 8) == []


def test_too_many_of_them_are_broken_weights(run):
    suspects = Suspects(run)
    for sample in range(2):
        suspects.accuse((f"a/{sample}",))
        suspects.leave_out("not finite")
    suspects.accuse(("a/2",))
    with pytest.raises(NumericsError, match="3 of 8 samples"):
        suspects.leave_out("not finite")
