"""Bytes of a run folder change while nothing runs; then the same command is given again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from argusrl.journal.commits import CommitChain
from argusrl.journal.verify import verify_run
from argusrl.observe.events import read_events
from argusrl.storage.layout import RunFolder
from e2e.conftest import QUICKSTART, SMALL, argusrl
from e2e.started import only_in_test_faults, same_end

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def copy_of(folder: RunFolder, root: Path) -> RunFolder:
    shutil.copytree(folder.path, root / folder.name)
    return RunFolder(root / folder.name)


def cut_off(folder: RunFolder, root: Path) -> RunFolder:
    """A copy as it was before the last commit: the journal of step 3 is there, and nothing that came after it."""
    run = copy_of(folder, root)
    run.commit(3).unlink()
    run.evaluation(3).unlink()
    for path in (*run.adapters.glob("v000003.*"), *run.checkpoints.glob("000003.*")):
        shutil.rmtree(path)
    return run


def flip(path: Path, at: float = 0.5) -> None:
    """One bit, so far into the file."""
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1
    path.write_bytes(data)


def newest(folder: Path, pattern: str = "*") -> Path:
    return max(path for path in folder.glob(pattern) if not path.name.startswith("."))


def shard(run: RunFolder) -> Path:
    return max(newest(run.checkpoints).glob("*"), key=lambda path: path.stat().st_size)


def adapter(run: RunFolder) -> Path:
    head = CommitChain(run).head()
    return run.absolute(head.adapter.path) / "adapter_model.safetensors"


def all_shards(run: RunFolder) -> None:
    for checkpoint in run.checkpoints.iterdir():
        if checkpoint.is_dir():
            flip(max(checkpoint.glob("*"), key=lambda path: path.stat().st_size))


STOPS: dict[str, Callable[[RunFolder], object]] = {
    "garbage in config.yaml": lambda run: run.config.write_bytes(b"\x93\x00garbage: [\n"),
    "an empty config.yaml": lambda run: run.config.write_bytes(b""),
    "a bit of config.yaml": lambda run: flip(run.config),
    "a bit of the newest commit": lambda run: flip(newest(run.commits)),
    "a bit of an older commit": lambda run: flip(run.commit(1)),
    "an older commit is gone": lambda run: run.commit(1).unlink(),
    "the first commit is gone": lambda run: run.commit(0).unlink(),
    "half of the newest commit": lambda run: newest(run.commits).write_bytes(newest(run.commits).read_bytes()[:200]),
}


@pytest.mark.parametrize("damage", STOPS)
def test_what_the_run_cannot_do_without_stops_it_with_the_reason(calm, tmp_path, damage):
    run = copy_of(calm, tmp_path)
    STOPS[damage](run)
    words = [*SMALL, "algorithm.num_steps=4", f"run.root={tmp_path}", f"run.name={run.name}"]
    result = argusrl("train", QUICKSTART, *words)
    assert result.code == 6, result.out + result.err
    assert str(run.path) in result.err + result.out
    assert not run.commit(4).exists()


def damaged_checkpoint_and_journal(run: RunFolder) -> None:
    all_shards(run)
    flip(newest(run.trajectories(2), "*.seg"))


SLOW_STOPS: dict[str, Callable[[RunFolder], object]] = {
    "a bit of the newest adapter": lambda run: flip(adapter(run)),
    "a bit of a segment that a replay needs": damaged_checkpoint_and_journal,
}


@only_in_test_faults
@pytest.mark.parametrize("damage", SLOW_STOPS)
def test_what_is_missed_later_stops_the_run_with_the_reason_too(calm, tmp_path, damage):
    run = cut_off(calm, tmp_path)
    SLOW_STOPS[damage](run)
    words = [*SMALL, f"run.root={tmp_path}", f"run.name={run.name}"]
    result = argusrl("train", QUICKSTART, *words)
    assert result.code == 6, result.out + result.err
    assert not run.commit(3).exists()
    assert verify_run(run) != []


def every_checkpoint_and_the_open_journal(run: RunFolder) -> None:
    all_shards(run)
    flip(newest(run.trajectories(3), "*.seg"))


def what_is_only_told(run: RunFolder) -> None:
    told = [run.metrics, run.events, *run.attempts.glob("*/verdict.json"), *run.attempts.glob("*/heartbeat.json")]
    for path in told:
        path.write_bytes(path.read_bytes()[:40] + b"\n\x00garbage\n")
    flip(newest(run.epochs))  # its name is what counts


GOES_ON = [every_checkpoint_and_the_open_journal, what_is_only_told]


@only_in_test_faults
@pytest.mark.parametrize("damage", GOES_ON)
def test_what_can_be_made_again_is(calm, tmp_path, damage):
    run = cut_off(calm, tmp_path)
    damage(run)
    result = argusrl("train", QUICKSTART, *SMALL, f"run.root={tmp_path}", f"run.name={run.name}")
    assert result.code == 0, result.out + result.err
    assert same_end(run, calm)


@only_in_test_faults
def test_the_checkpoint_before_a_damaged_one_is_used(calm, tmp_path):
    run = copy_of(calm, tmp_path)
    flip(shard(run))
    words = [*SMALL, "algorithm.num_steps=4", f"run.root={tmp_path}", f"run.name={run.name}"]
    result = argusrl("train", QUICKSTART, *words)
    assert result.code == 0, result.out + result.err
    events = read_events(run.events)
    (resumed,) = [event for event in events if event["kind"] == "resumed"]
    assert resumed["checkpoint"] == 2  # and the update of step 3 was done again, exactly
    assert any(event["kind"] == "checkpoint_damaged" for event in events)
