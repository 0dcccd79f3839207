"""Two controllers and one run under everything that may befall a cluster, seed by seed.

`make test-faults` plays a tenth of ARGUSRL_SEEDS of them; `make test` a fixed few. One seed again:
ARGUSRL_SEED=4711 python -m pytest tests/faults/test_controller_simulation.py
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest

from argusrl.cluster import decide, node_care, node_rule, run_control, sighting, targets
from argusrl.cluster.job_ends import JobEnds
from argusrl.cluster.run_control import RunControl
from argusrl.cluster.run_record import RunRecord
from argusrl.cluster.targets import RayJobTarget
from faults import simulated_controllers
from faults.controller_simulation import Broken, simulate
from faults.seeds import SHOWN, failing, failures_of

EXHAUSTIVE = os.environ.get("ARGUSRL_FAULTS") == "all"
SEEDS = int(os.environ.get("ARGUSRL_SEEDS", "1200")) // 10
MUTANT_SEEDS = 3000  # at most; each mutant below dies much sooner, but for one of RARER


def failures(first: int, last: int) -> list[str]:
    return failing(simulate, Broken, first, last)


@pytest.mark.timeout(3 * 3600)
def test_no_seed_breaks_an_invariant():
    found = failures_of(failures, SEEDS, chunk=250)
    assert not found, "\n".join(found[:SHOWN])


def without(*names: str):
    """Rows of the decision table are forgotten."""

    def mutate(monkeypatch):
        monkeypatch.setattr(decide, "TABLE", tuple(row for row in decide.TABLE if row.name not in names))

    mutate.__name__ = f"without_{'_'.join(names)}"
    return mutate


def nobody_is_fenced(monkeypatch):
    monkeypatch.setattr(run_control, "fence", lambda *_: 0)


def what_is_replaced_lives_on(monkeypatch):
    monkeypatch.setattr(RayJobTarget, "remove", lambda *_: True)


def names_are_made_up(monkeypatch):
    numbers = itertools.count(1)
    made = targets.next_manifest

    def renamed(manifest, run, number):
        document = made(manifest, run, number)
        document["metadata"]["name"] = f"maze-s{number}-{next(numbers)}"
        return document

    monkeypatch.setattr(run_control, "next_manifest", renamed)


def every_intent_is_carried_out_again(monkeypatch):
    """That its object was there is not written down."""
    made = run_control.record_made

    def only_of_people(run, record):
        return record if record.number > 1 else made(run, record)

    monkeypatch.setattr(run_control, "record_made", only_of_people)


def an_end_is_recorded_without_a_second_look(monkeypatch):
    """That another controller goes on with the run is not noticed."""
    end = RunControl._end
    monkeypatch.setattr(
        RunControl, "_end", lambda self, decision, view: end(self, decision, replace(view, newest=1_000_000))
    )


def kueue_is_not_heeded(monkeypatch):
    monkeypatch.setattr(targets, "is_admitted", lambda ray_job: True)
    states = sighting._DEPLOYMENT
    monkeypatch.setattr(
        targets, "job_of", lambda job: states.get(job.get("status", {}).get("jobDeploymentStatus"), "running")
    )


def partitions_are_taken_for_losses(monkeypatch):
    rows = tuple(replace(row, action="resubmit") if row.name == "partition" else row for row in decide.TABLE)
    monkeypatch.setattr(decide, "TABLE", rows)


def nobody_is_patient(monkeypatch):
    monkeypatch.setattr(decide, "GATES", ())


def repairs_are_not_recorded(monkeypatch):
    monkeypatch.setattr(node_care, "record_action", lambda run, action: True)


def readings_are_taken_for_faults(monkeypatch):
    """What a probe goes on reading until a reboot happens is taken for found after it."""
    numbers = itertools.count()
    monkeypatch.setattr(node_rule, "_start_of", lambda evidence: next(numbers))


def what_kuberay_deletes_is_taken_for_stopped(monkeypatch):
    monkeypatch.setattr(JobEnds, "as_it_was", lambda *_: None)


def hours_begin_anew_with_every_epoch(monkeypatch):
    class Latest(dict):
        def setdefault(self, attempt, time):
            self[attempt] = time

    monkeypatch.setattr(simulated_controllers, "RunRecord", lambda *parts: RunRecord(*parts, _began=Latest()))


MUTANTS = (
    without("complete"),
    without("final_code"),
    without("vanished"),
    without("job_failed", "ending"),
    without("false_success"),
    without("hung"),
    without("carry_out"),
    without("not_admitted", "suspended"),
    nobody_is_fenced,
    what_is_replaced_lives_on,
    names_are_made_up,
    every_intent_is_carried_out_again,
    kueue_is_not_heeded,
    partitions_are_taken_for_losses,
    repairs_are_not_recorded,
    readings_are_taken_for_faults,
    what_kuberay_deletes_is_taken_for_stopped,
    hours_begin_anew_with_every_epoch,
)
RARER = (  # they show once in a hundred seeds, or after many simulated hours
    without("head_lost", "hung"),
    without("left_over"),
    an_end_is_recorded_without_a_second_look,
    nobody_is_patient,
)


@pytest.mark.parametrize("mutate", [*MUTANTS, *(RARER if EXHAUSTIVE else ())], ids=lambda mutate: mutate.__name__)
def test_a_seeded_bug_is_found(mutate, monkeypatch):
    mutate(monkeypatch)
    for seed in range(MUTANT_SEEDS):
        try:
            simulate(seed)
        except Broken:
            return
    pytest.fail(f"{MUTANT_SEEDS} seeds did not notice")
