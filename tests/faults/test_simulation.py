"""Drivers, workers and storage of one run under everything that may befall them, seed by seed.

`make test-faults` plays ARGUSRL_SEEDS of them; `make test` a fixed few. One seed again:
ARGUSRL_SEED=4711 python -m pytest tests/faults/test_simulation.py
"""

from __future__ import annotations

import os

import pytest

from argusrl.journal import commits, episodes, retention, segments
from argusrl.storage import publish
from argusrl.training.fence import Fence
from faults.seeds import SHOWN, failing, failures_of
from faults.simulation import Broken, simulate, simulated_storage

SEEDS = int(os.environ.get("ARGUSRL_SEEDS", "700"))
MUTANT_SEEDS = 1500  # at most; each mutant below dies much sooner


def failures(first: int, last: int) -> list[str]:
    with simulated_storage():
        return failing(simulate, Broken, first, last)


@pytest.mark.timeout(3 * 3600)
def test_no_seed_breaks_an_invariant():
    found = failures_of(failures, SEEDS, chunk=1000)
    assert not found, "\n".join(found[:SHOWN])


def append_without_a_second_look(monkeypatch):
    """The epoch is not checked after the link."""
    append = commits.CommitChain.append

    def hasty(self, commit):
        calls, check = 0, type(self._epoch).check

        def first_only(epoch):
            nonlocal calls
            calls += 1
            if calls == 1:
                check(epoch)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(type(self._epoch), "check", first_only)
            return append(self, commit)

    monkeypatch.setattr(commits.CommitChain, "append", hasty)


def names_are_never_made_durable(monkeypatch):
    monkeypatch.setattr(publish, "fsync_path", lambda path: None)


def segments_are_never_made_durable(monkeypatch):
    def mark_only(self):
        self._durable = self._end

    monkeypatch.setattr(segments.SegmentWriter, "_sync", mark_only)


def a_taken_name_is_overwritten(monkeypatch):
    monkeypatch.setattr(os, "link", lambda source, target: os.replace(source, target))
    monkeypatch.setattr(publish, "publish_file", publish.replace_file)
    monkeypatch.setattr(commits, "publish_file", publish.replace_file)


def workers_listen_to_everybody(monkeypatch):
    monkeypatch.setattr(Fence, "check", lambda self, epoch, step: None)


def deletions_leave_no_record(monkeypatch):
    monkeypatch.setattr(retention, "publish_file", lambda path, data: None)


def nothing_is_adopted(monkeypatch):
    monkeypatch.setattr(episodes, "_segments_below", lambda folder, epoch: [])


def folders_are_trusted(monkeypatch):
    """A folder that is there is taken for durable, whoever made it."""
    monkeypatch.setattr(publish, "_settle", lambda folder: None)


MUTANTS = (
    append_without_a_second_look,
    names_are_never_made_durable,
    segments_are_never_made_durable,
    a_taken_name_is_overwritten,
    deletions_leave_no_record,
    nothing_is_adopted,
    folders_are_trusted,
    workers_listen_to_everybody,
)


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_seeded_bug_is_found(mutate, monkeypatch):
    with simulated_storage():
        mutate(monkeypatch)
        for seed in range(MUTANT_SEEDS):
            try:
                simulate(seed)
            except Broken:
                return
    pytest.fail(f"{MUTANT_SEEDS} seeds did not notice")
