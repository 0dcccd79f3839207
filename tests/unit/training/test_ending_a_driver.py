"""What the loop does not heal: decisions that end a driver, storage that stays away, faults after a stop signal."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from argusrl.errors import AdapterRefused, CorruptionError, Interrupted, ModelError, StorageError, WorkerError
from argusrl.recovery.decide import Decision
from argusrl.storage.layout import RunFolder
from argusrl.storage.manifest import write_manifest
from argusrl.training import trainer
from argusrl.training.draining import NodeLeaving
from argusrl.training.healing import Healing
from argusrl.training.run import Run


class FakeRun:
    """Enough of a run for its loop; `faults` are raised one after the other by whatever it does."""

    give_up = Run.give_up
    wait_for_storage = Run.wait_for_storage
    unless_stopped = Run.unless_stopped
    leave = Run.leave

    def __init__(self, tmp_path, decision: str, faults) -> None:
        self.folder = RunFolder(tmp_path / "run")
        self.config = SimpleNamespace(recovery=SimpleNamespace(storage_wait_seconds=0.0))
        self.chain = SimpleNamespace(head_sha256="")
        self.state = SimpleNamespace(adapter=object(), step=3)
        self.workers = SimpleNamespace(position=SimpleNamespace(step=4))
        self.stop, self.failure, self.leaving = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.fault, self.journal_open = None, False
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


class Playing:
    """Episode workers that note what they are asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def count(self) -> None:
        self.asked.append("count")

    async def seal(self) -> None:
        self.asked.append("seal")

    async def keep_state(self) -> None:
        self.asked.append("checkpoint")

    async def in_time(self, work) -> None:
        await work


@pytest.mark.parametrize(
    ("stopped", "settled", "end", "asked"),
    [
        (False, True, NodeLeaving, ["count", "seal", "checkpoint"]),
        (False, False, NodeLeaving, ["count", "seal"]),  # ranks are not in the state of a commit
        (True, True, Interrupted, ["seal"]),  # the whole run ends: nothing has to be gone on with elsewhere
    ],
)
def test_a_node_to_be_left_ends_what_is_played_in_good_order(tmp_path, stopped, settled, end, asked):
    async def play() -> list[str]:
        run, playing = FakeRun(tmp_path, "wait", []), Playing()
        run.workers.episodes, run.healing.drains, run.journal_open = playing, playing, True
        run.settled, run.keep_state = settled, playing.keep_state
        run.leaving.set()
        if stopped:
            run.stop.set()
        with pytest.raises(end):
            await run.unless_stopped(asyncio.sleep(60))
        assert await run.unless_stopped(asyncio.sleep(0, "done already")) == "done already"
        return playing.asked

    assert asyncio.run(play()) == asked


def test_a_node_that_is_left_in_the_first_start_does_not_end_the_driver(monkeypatch, tmp_path):
    run, done = FakeRun(tmp_path, "stop", [NodeLeaving("a node is left")]), []
    run.state.adapter = None

    async def recover(run, fault):
        done.append(type(fault))
        raise ModelError("the next one does")

    monkeypatch.setattr(trainer, "recover", recover)
    with pytest.raises(ModelError):
        run_loop(monkeypatch, run)
    assert done == [NodeLeaving]
