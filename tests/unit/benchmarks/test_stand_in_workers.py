"""The stand-ins of the driver's memory benchmark answer whatever a driver asks of workers in an undisturbed run."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

from argusrl.training.fleet import EngineFleet, EpisodeFleet, Fleet, RankFleet

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import stand_in_workers as stand_ins

RECOVERY_AND_EVALUATION = {"load_checkpoint", "load_adapter of a rank", "evaluate"}
_CALL = re.compile(
    r'self\._(?:all|each|one|pair|start)\((?:[^"()]*(?:\([^()]*\))?[^"()]*)"(\w+)"'
    r"|\.actor\.(\w+)\.remote"
)


@pytest.mark.parametrize(
    ("fleet", "stand_in"),
    [
        (EngineFleet, stand_ins.StandInEngine),
        (RankFleet, stand_ins.StandInRank),
        (EpisodeFleet, stand_ins.StandInEpisodes),
    ],
)
def test_every_call_of_a_fleet_has_an_answer(fleet, stand_in):
    source = inspect.getsource(Fleet) + inspect.getsource(fleet)
    asked = {one or other for one, other in _CALL.findall(source)}
    assert len(asked) > 3
    missing = {f"{name} of a rank" if (fleet, name) == (RankFleet, "load_adapter") else name for name in asked}
    missing = {name for name in missing - RECOVERY_AND_EVALUATION if not hasattr(stand_in, name)}
    assert not missing
