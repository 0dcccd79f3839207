from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from argusrl.observe.events import EventLog, read_events
from argusrl.recovery.failpoints import Plan, Shot, Victim, write_plan
from argusrl.storage.layout import RunFolder
from argusrl.training.shooting import rehearsal_of, shoot_oneself


class Fleet:
    """Two workers of a kind that note the calls that would end them."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self.calls: list[tuple[int, tuple[Any, ...]]] = []
        self.members = [self._member(number) for number in range(2)]

    def _member(self, number: int) -> Any:
        die = SimpleNamespace(remote=lambda *arguments: self.calls.append((number, arguments)))
        return SimpleNamespace(actor=SimpleNamespace(die=die))

    def name(self, number: int) -> str:
        return f"{self.noun} {number}"


def run_of(root: Path, *shots: Shot) -> Any:
    folder = RunFolder(root)
    write_plan(folder, Plan(shots=shots))
    workers = SimpleNamespace(engines=Fleet("engine"), ranks=Fleet("rank"), episodes=Fleet("episode worker"))
    return SimpleNamespace(
        folder=folder,
        workers=workers,
        events=EventLog(folder.events),
        state=SimpleNamespace(step=3),
        attempt=2,
        epoch=SimpleNamespace(number=5),
    )


@pytest.mark.parametrize(
    ("victim", "fleet", "name"),
    [
        ("engine", "engines", "engine 1"),
        ("rank", "ranks", "rank 1"),
        ("episode_worker", "episodes", "episode worker 1"),
    ],
)
def test_a_worker_is_told_to_shoot_itself_and_the_shot_is_an_event(
    tmp_path: Path, victim: Victim, fleet: str, name: str
) -> None:
    run = run_of(tmp_path, Shot(point="training", step=4, victim=victim, number=7, how="stop"))
    rehearsal = rehearsal_of(run)
    assert rehearsal is not None
    rehearsal.reached("training", 4)
    assert getattr(run.workers, fleet).calls == [(1, (5, 0, "stop"))]  # numbers beyond the last start over
    (event,) = read_events(run.folder.events)
    assert event["kind"] == "shot"
    assert {event[key] for key in ("victim", "member", "how", "point")} == {victim, name, "stop", "training"}
    assert (event["step"], event["attempt"], event["epoch"]) == (4, 2, 5)


@pytest.mark.parametrize(("how", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_driver_shoots_itself_after_it_has_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any, number: int
) -> None:
    run = run_of(tmp_path, Shot(point="committing", step=4, victim="driver", how=how))
    sent: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, what: sent.append((pid, what, len(read_events(run.folder.events)))))
    rehearsal = rehearsal_of(run)
    assert rehearsal is not None
    rehearsal.reached("committing", 4)
    assert sent == [(os.getpid(), number, 1)]


def test_a_signal_goes_to_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    shoot_oneself("kill")
    assert sent == [(os.getpid(), signal.SIGKILL)]
