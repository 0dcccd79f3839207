"""Who is hired: processes that were begun early, workers that live, new ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from argusrl.config.validate import validate
from argusrl.storage.layout import RunFolder
from argusrl.training import bring_up
from argusrl.training.bring_up import Hiring, hire
from argusrl.training.checks import CheckedInput
from argusrl.training.fleet import Position
from argusrl.training.placement import Layout

CHECKED = CheckedInput(
    prompts=8,
    heldout_prompts=0,
    bad_rows={"train": []},
    max_images=1,
    banned_ids=(),
    end_ids=(1,),
    adapted_layers=("q_proj",),
    warnings=(),
)


class Placement:
    """Starts names instead of processes, and finds again what it started, as Ray does."""

    layout = Layout("cpu", 2, 2, True, 1, 1.0)
    epoch = 1

    def __init__(self, *living: str) -> None:
        self.names = list(living)

    def start(self, kind, number, *_, **__):
        self.names.append(f"{kind}{number}")
        return self._actor(self.names[-1])

    def find(self):
        places = {
            name: (name.rstrip("0123456789"), int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))) for name in self.names
        }
        return {place: self._actor(name) for name, place in places.items()}

    def _actor(self, name):
        return SimpleNamespace(name=name, start=SimpleNamespace(remote=lambda *_: f"{name} starts"))


@pytest.fixture
def hiring(tmp_path, tiny_model):
    def of(placement: Placement) -> Hiring:
        recipe = {"model": {"path": str(tiny_model)}, "rewards": [{"kind": "exact"}], "data": {"train": "x"}}
        return Hiring(validate(recipe), RunFolder(tmp_path), placement, tmp_path, Position(1))

    return of


def test_engines_that_were_begun_are_told_what_they_are_and_not_taken_for_living_ones(hiring):
    placement = Placement()
    one = hiring(placement)
    one.begin_engines()
    assert placement.names == ["engine0", "engine1"]
    one.checked = CHECKED
    workers = hire(one)
    assert [member.started for member in workers.engines.members] == ["engine0 starts", "engine1 starts"]
    assert all(member.fresh for member in workers.engines.members)
    assert placement.names == ["engine0", "engine1", "rank0", "rank1", "w0"]


def test_an_engine_that_lives_is_not_begun_again(hiring):
    placement = Placement("engine1")
    one = hiring(placement)
    one.begin_engines()
    one.checked = CHECKED
    engines = hire(one).engines.members
    assert [(member.actor.name, member.fresh) for member in engines] == [("engine0", True), ("engine1", False)]


def test_what_was_begun_in_vain_is_ended(hiring, monkeypatch):
    killed = []
    monkeypatch.setattr(bring_up, "kill", lambda actor: killed.append(actor.name))
    monkeypatch.setattr(bring_up, "_serves", lambda _: 0)
    one = hiring(Placement("standby1000"))
    one.begin_engines()
    one.checked = CHECKED
    engines = hire(one).engines.members
    assert [member.actor.name for member in engines] == ["standby1000", "engine1"]
    assert killed == ["engine0"]
    assert one.begun == {}  # nobody is taken for a replacement later
