"""What the loop does not heal: decisions that end a driver, storage that stays away, faults after a stop signal."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from argusrl.errors import AdapterRefused, CorruptionError, Interrupted, StorageError, WorkerError
from argusrl.recovery.decide import Decision
from argusrl.storage.layout import RunFolder
from argusrl.storage.manifest import write_manifest
from argusrl.training import trainer
from argusrl.training.healing import Healing
from argusrl.training.run import Run


class FakeRun:
    """Enough of a run for its loop; `faults` are raised one after the other by whatever it does."""

    give_up = Run.give_up
    wait_for_storage = Run.wait_for_storage
    unless_stopped = Run.unless_stopped

    def __init__(self, tmp_path, decision: str, faults) -> None:
        self.folder = RunFolder(tmp_path / "run")
        self.config = SimpleNamespace(recovery=SimpleNamespace(storage_wait_seconds=0.0))
        self.chain = SimpleNamespace(head_sha256="")
        self.state = SimpleNamespace(adapter=object(), step=3)
        self.workers = SimpleNamespace(position=SimpleNamespace(step=4))
        self.stop, self.failure, self.fault, self.journal_open = asyncio.Event(), asyncio.Event(), None, False
        self.events: list[str] = []
        self.faults = list(faults)
        self.healing = SimpleNamespace(run=self, prepare=lambda error: Healing.prepare(self.healing, error))
        self.healing.judge = lambda *_: Decision(decision, "the rule says so")
        self.healing._classify = self._classify
        self.healing._lost_node = self._no_node

    def needed_bytes(self) -> int:
        return 0

    def phase(self, name: str) -> None: ...

    def say(self, kind: str, message: str, **_: object) -> None:
        self.events.append(kind)

    def at(self, point: str) -> None:
        raise self.faults.pop(0)

    def _classify(self, error):
        return ("storage" if isinstance(error, StorageError) else "rank"), "rank 0", "raised"

    async def _no_node(self, _):
        return None


def run_loop(monkeypatch, run: FakeRun) -> None:
    async def bring_to_life(run):
        raise run.faults.pop(0)

    monkeypatch.setattr(trainer, "bring_to_life", bring_to_life)
    asyncio.run(trainer.train(run, sinks=None))


def test_a_decision_to_restart_ends_the_driver(monkeypatch, tmp_path):
    run = FakeRun(tmp_path, "restart_driver", [WorkerError("rank 0 broke")])
    with pytest.raises(WorkerError, match="the rule says so"):
        run_loop(monkeypatch, run)


def test_storage_that_stays_away_is_waited_for_once(monkeypatch, tmp_path):
    run = FakeRun(tmp_path, "wait", [StorageError("no space"), AssertionError("went on")])
    with pytest.raises(StorageError, match="is not there; waited"):
        run_loop(monkeypatch, run)
    assert run.faults


def test_what_is_missing_with_its_folder_is_not_damaged(monkeypatch, tmp_path):
    run = FakeRun(tmp_path, "wait", [CorruptionError("a segment is missing")])
    with pytest.raises(StorageError, match="is not there; waited") as caught:
        run_loop(monkeypatch, run)
    assert not isinstance(caught.value, CorruptionError)


def test_damage_is_not_healed(monkeypatch, tmp_path):
    run = FakeRun(tmp_path, "wait", [CorruptionError("a byte flipped")])
    run.folder.path.mkdir()
    run.folder.config.write_text("")
    with pytest.raises(CorruptionError, match="a byte flipped"):
        run_loop(monkeypatch, run)


@pytest.mark.parametrize("damaged", [True, False])
def test_an_adapter_that_is_refused_because_it_was_damaged_is_no_fault_of_engines(monkeypatch, tmp_path, damaged):
    folder = tmp_path / "run" / "adapters" / "v1"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"good")
    write_manifest(folder, {})
    if damaged:
        (folder / "weights").write_bytes(b"gOod")

    async def serve(*_):
        raise AdapterRefused("engine 0 has another digest")

    monkeypatch.setattr(trainer, "serve", serve)
    version = SimpleNamespace(adapter=SimpleNamespace(path="adapters/v1"))
    with pytest.raises(CorruptionError if damaged else AdapterRefused):
        asyncio.run(trainer._serve_committed(FakeRun(tmp_path, "", []), version))


def test_a_fault_after_a_stop_signal_does_not_keep_the_driver(monkeypatch, tmp_path):
    run = FakeRun(tmp_path, "recover", [WorkerError("its journal could not be sealed")])
    run.stop.set()
    with pytest.raises(Interrupted):
        run_loop(monkeypatch, run)
