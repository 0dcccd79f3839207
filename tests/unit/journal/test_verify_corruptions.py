"""Seeded corruptions of a whole run: each is found, or is of something that no commit needs."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace

import msgspec
import pytest

from argusrl.journal.commits import CommitChain, encode_commit
from argusrl.journal.verify import verify_run
from argusrl.storage.layout import RunFolder
from argusrl.storage.sealed_json import encode_sealed
from argusrl.types import TrajectoryKey
from fakes.run_folder import memory_folder, safetensors_bytes
from faults.small_driver import SmallDriver

SEEDS = 120


@pytest.fixture(scope="module")
def template():
    with memory_folder() as folder:
        SmallDriver(RunFolder(folder / "run"), lambda *_: None, steps=3).drive()
        assert verify_run(RunFolder(folder / "run")) == []
        yield folder / "run"


@pytest.fixture
def run(template, tmp_path):
    return RunFolder(shutil.copytree(template, tmp_path / "run"))


def files(run):
    folders = ("commits", "trajectories", "images", "adapters", "checkpoints", "retired")
    return [path for name in folders for path in sorted((run.path / name).rglob("*")) if path.is_file()]


def rewrite(run, step, **changes):
    """Change a commit, its seal and the links after it: what a careful forger would do."""
    chain = CommitChain(run)
    newest = chain.head().step
    commits = {number: chain.read(number) for number in range(step, newest + 1)}
    commits[step] = msgspec.structs.replace(commits[step], **changes)
    for number in range(step, newest + 1):
        previous = "" if number == 0 else chain.read_bytes(number - 1)[1]
        data = encode_commit(msgspec.structs.replace(commits[number], previous=previous))
        run.commit(number).write_bytes(data)


@pytest.mark.parametrize("kind", ["flip", "cut", "remove", "swap", "double"])
def test_any_file_that_is_changed(run, kind):
    chance = random.Random(kind)
    kept = files(run)
    for _ in range(SEEDS // 5):
        one, other = chance.sample(kept, 2)
        before = {path: path.read_bytes() for path in (one, other)}
        data = before[one]
        if kind == "flip":
            place = chance.randrange(len(data))
            one.write_bytes(data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :])
        elif kind == "cut":
            one.write_bytes(data[: chance.randrange(len(data))])
        elif kind == "remove":
            one.unlink()
        elif kind == "swap":
            one.write_bytes(before[other])
            other.write_bytes(data)
        else:
            one.write_bytes(data + data)
        # A record of a deletion is needed only while somebody would miss what was deleted: old checkpoints are not.
        harmless = kind == "remove" and one.parent == run.retired and "checkpoints" in one.name
        assert verify_run(run) or harmless or before[one] == before[other], f"{kind}: {one} ({other})"
        for path, old in before.items():
            path.write_bytes(old)
    assert verify_run(run) == []


def test_a_renumbered_commit(run):
    run.commit(3).rename(run.commit(4))
    assert "not consecutive" in "\n".join(verify_run(run))


def test_a_forged_reward(run):
    first, second = CommitChain(run).read(2).trajectories
    rewrite(run, 2, trajectories=(msgspec.structs.replace(first, reward=9.0), second))
    assert "has reward" in "\n".join(verify_run(run))


def test_a_dropped_trajectory_is_a_hole(run):
    rewrite(run, 2, trajectories=CommitChain(run).read(2).trajectories[:1])
    assert "lacks [1]" in "\n".join(verify_run(run))


def test_a_dropped_group_is_a_hole(run):
    rewrite(run, 2, trajectories=())
    assert "accounts for 0 prompts, a step has 1" in "\n".join(verify_run(run))


def test_a_trajectory_of_another_step(run):
    first, second = CommitChain(run).read(2).trajectories
    forged = msgspec.structs.replace(first, key=TrajectoryKey(1, first.key.prompt_id, first.key.sample))
    rewrite(run, 2, trajectories=(forged, second))
    assert "of another step" in "\n".join(verify_run(run))


def test_a_skipped_step_that_changed_the_state(run):
    rewrite(run, 3, outcome="skipped")
    assert "is skipped, yet its state digest differs" in "\n".join(verify_run(run))


def test_a_falling_epoch(run):
    rewrite(run, 1, epoch=2)
    text = "\n".join(verify_run(run))
    assert "of epoch 2, which nobody claimed" in text
    assert "is of epoch 1, the commit before it of 2" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_committed_adapter_that_is_not_finite(run, value):
    """Every digest agrees: only the numbers tell."""
    import hashlib

    adapter = CommitChain(run).read(3).adapter
    folder = run.absolute(adapter.path)
    data = safetensors_bytes([0.5, value])
    (folder / "adapter_model.safetensors").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["seal"]
    manifest["files"]["adapter_model.safetensors"] = {"bytes": len(data), "sha256": digest}
    (folder / "manifest.json").write_bytes(encode_sealed(manifest))
    rewrite(run, 3, adapter=replace(adapter, file_sha256=digest))
    assert "1 of 2 numbers of lora are NaN or infinite" in "\n".join(verify_run(run))


def test_an_event_without_its_kind(run):
    with run.events.open("ab") as file:
        file.write(b'{"time": "now", "message": "x"}\n')
    assert "lacks a time, kind or message" in "\n".join(verify_run(run))
