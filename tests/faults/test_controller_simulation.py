"""Two controllers and one run under everything that may befall a cluster, seed by seed.

`make test-faults` plays a tenth of ARGUSRL_SEEDS of them; `make test` a fixed few. One seed again:
ARGUSRL_SEED=4711 python -m pytest tests/faults/test_controller_simulation.py
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest

from argusrl.cluster import decide, node_care, run_control, sighting, targets
from argusrl.cluster.node_care import NodeCare
from argusrl.cluster.run_control import RunControl
from argusrl.cluster.targets import RayJobTarget
from faults.controller_simulation import Broken, simulate

EXHAUSTIVE = os.environ.get("ARGUSRL_FAULTS") == "all"
SEEDS = int(os.environ.get("ARGUSRL_SEEDS", "1200")) // 10
PROCESSES = int(os.environ.get("ARGUSRL_FAULT_PROCESSES", "1"))
ONLY = os.environ.get("ARGUSRL_SEED")
SHOWN = 10  # failures; more say nothing more
MUTANT_SEEDS = 800  # at most; each mutant below dies much sooner


def failures(first: int, last: int) -> list[str]:
    """Play seeds first … last - 1; one line for each that fails."""
    found = []
    for seed in range(first, last):
        try:
            simulate(seed)
        except Broken as broken:
            found.append(f"ARGUSRL_SEED={seed}: {broken}")
        if len(found) == SHOWN:
            break
    return found


@pytest.mark.timeout(3 * 3600)
def test_no_seed_breaks_an_invariant():
    if ONLY:
        found = failures(int(ONLY), int(ONLY) + 1)
    elif PROCESSES == 1:
        found = failures(0, SEEDS)
    else:
        chunk = 250
        starts = range(0, SEEDS, chunk)
        with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
            parts = pool.map(failures, starts, [min(start + chunk, SEEDS) for start in starts])
            found = [line for part in parts for line in part]
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
    monkeypatch.setattr(run_control, "exists", lambda path: False)
    monkeypatch.setattr(run_control, "newest_submission", lambda run: 0)


def kueue_is_not_heeded(monkeypatch):
    monkeypatch.setattr(targets, "is_admitted", lambda ray_job: True)
    states = sighting._DEPLOYMENT
    monkeypatch.setattr(
        targets, "job_of", lambda job: states.get(job.get("status", {}).get("jobDeploymentStatus"), "running")
    )


def strays_are_left(monkeypatch):
    monkeypatch.setattr(RunControl, "_remove_stray", lambda self, found: None)


def partitions_are_taken_for_losses(monkeypatch):
    rows = tuple(replace(row, action="resubmit") if row.name == "partition" else row for row in decide.TABLE)
    monkeypatch.setattr(decide, "TABLE", rows)


def nobody_is_patient(monkeypatch):
    monkeypatch.setattr(decide, "GATES", ())


def repairs_are_not_recorded(monkeypatch):
    monkeypatch.setattr(node_care, "record_action", lambda run, action: True)


def silent_nodes_are_taken_for_dead(monkeypatch):
    why = NodeCare._why_free
    monkeypatch.setattr(
        NodeCare, "_why_free", lambda self, pod, node: why(self, pod, node) or ("" if node.ready else "?")
    )


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
)
RARER = (  # they show once in a hundred seeds, or after many simulated hours
    without("head_lost"),
    without("left_over"),
    an_end_is_recorded_without_a_second_look,
    strays_are_left,
    nobody_is_patient,
    silent_nodes_are_taken_for_dead,
)


@pytest.mark.parametrize("mutate", [*MUTANTS, *(RARER if EXHAUSTIVE else ())], ids=lambda mutate: mutate.__name__)
def test_a_seeded_bug_is_found(mutate, monkeypatch):
    mutate(monkeypatch)
    for seed in range(MUTANT_SEEDS):
        try:
            simulate(seed)
        except Exception:  # an invariant, or code that cannot go on
            return
    pytest.fail(f"{MUTANT_SEEDS} seeds did not notice")
