"""The whole command on the real stack: train, resume, verify, evaluate, export, fork."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import psutil
import pytest

from argusrl.journal.commits import CommitChain
from argusrl.journal.verify import verify_run
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import read_lines
from e2e.conftest import QUICKSTART, ROOT, SMALL, argusrl, command, environment

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

PROMISED = {
    "step",
    "reward/mean",
    "reward/std",
    "rollout/tokens_per_second",
    "rollout/trajectories",
    "rollout/failed_trajectories",
    "time/step_seconds",
    "time/rollout_seconds",
    "time/train_seconds",
    "time/sync_seconds",
    "policy/logprob_gap_max",
    "policy/grad_norm",
    "policy/loss",
    "adapter/version",
    "adapter/sha256",
}


def head(folder: RunFolder):
    commit = CommitChain(folder).head()
    assert commit is not None
    return commit


def test_a_run_leaves_a_sound_folder_with_the_promised_metrics(calm):
    assert verify_run(calm) == []
    rows = [row for row in read_lines(calm.metrics) if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row.keys() >= PROMISED
        assert row["rollout/trajectories"] == 32
        assert row["policy/logprob_gap_max"] < 1e-4
        assert row["adapter/canary_gap"] < 1e-4
    assert any(row["policy/grad_norm"] > 0 for row in rows)
    assert len({row["adapter/sha256"] for row in rows}) > 1


def test_runs_show_and_verify_tell_what_happened(calm):
    shown = argusrl("runs", "show", calm.path, "--json").json
    assert shown["steps"] == 3
    assert shown["adapter"] == {**shown["adapter"], "version": 3, "sha256": head(calm).adapter.sha256}
    assert argusrl("runs", "verify", calm.path).code == 0
    assert [record["step"] for record in shown["evaluations"]] == [0, 3]


def test_a_flipped_byte_is_found(calm, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", calm.path, copy], check=True)
    weights = copy / head(calm).adapter.path / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    result = argusrl("runs", "verify", copy)
    assert result.code == 6
    assert "adapter_model.safetensors" in result.out + result.err


@pytest.mark.parametrize("merge", [False, True])
def test_export_loads_back(calm, tmp_path, merge):
    target = tmp_path / "exported"
    result = argusrl("export", calm.path, "--to", target, "--json", *(["--merge"] if merge else []))
    assert result.code == 0, result.err
    assert result.json["largest_difference"] < 1e-4
    assert (target / ("model.safetensors" if merge else "adapter_model.safetensors")).is_file()


def test_evaluate_compares_base_and_adapter(calm):
    result = argusrl("evaluate", calm.path, "evaluate.prompts=8", "--json")
    assert result.code == 0, result.err
    for model in ("base", "adapter"):
        for replies in ("greedy", "sampled"):
            one = result.json[model][replies]
            assert one["count"] == 8
            assert one["low"] <= one["accuracy"] <= one["high"]


def test_rescoring_with_the_same_rewards_changes_nothing(calm):
    report = argusrl("rewards", "rescore", calm.path, "--json").json
    assert [step["trajectories"] for step in report] == [32, 32, 32]
    assert all(step["before"] == step["after"] for step in report)


def test_a_killed_driver_changes_nothing(calm, runs):
    """SIGKILL in a rollout, two steps after the last checkpoint: both are replayed, the end is bit for bit the same."""
    words = command("train", QUICKSTART, f"run.root={runs}", "run.name=killed", *SMALL, "checkpoint.every_steps=9")
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    killed = RunFolder(runs / "killed")
    segment = killed.segment(3, "w0", 1)
    while not (segment.exists() and segment.stat().st_size > 4000):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(driver_of(process).pid, signal.SIGKILL)
    assert process.wait(timeout=240) == 0
    assert verify_run(killed) == []
    assert head(killed).adapter.sha256 == head(calm).adapter.sha256
    assert head(killed).state_digest == head(calm).state_digest
    assert [json.loads(path.read_text())["outcome"] for path in sorted(killed.attempts.glob("*/verdict.json"))] == [
        "killed",
        "complete",
    ]


def test_a_stop_signal_seals_and_the_same_command_resumes(calm, runs):
    words = command("train", QUICKSTART, f"run.root={runs}", "run.name=stopped", *SMALL)
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    stopped = RunFolder(runs / "stopped")
    while not stopped.commit(1).exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    result = argusrl("train", QUICKSTART, f"run.root={runs}", "run.name=stopped", *SMALL)
    assert result.code == 0, result.err
    assert "Resuming" in result.out
    assert head(stopped).adapter.sha256 == head(calm).adapter.sha256
    assert verify_run(stopped) == []


def test_a_fork_starts_from_the_committed_adapter(calm, train):
    fork = train(
        "fork",
        *SMALL,
        "algorithm.num_steps=1",
        "evaluate.every_steps=0",
        "optimizer.learning_rate=0",
        options=("--from", f"{calm.path}@2"),
    )
    origin = CommitChain(calm).read(2).adapter
    assert CommitChain(fork).read(0).adapter.sha256 == origin.sha256
    assert head(fork).adapter.sha256 == origin.sha256  # a learning rate of zero moves nothing


def test_two_ranks_and_two_engines_learn_the_same(calm, train):
    """What is sampled does not depend on where, and the gradient does not depend on the number of ranks."""
    two = train("two", *SMALL, "cluster.slots=2", "evaluate.every_steps=0")
    one_row, two_row = (read_lines(folder.metrics) for folder in (calm, two))
    one_row, two_row = (next(row for row in rows if row["step"] == 1) for rows in (one_row, two_row))
    assert two_row["reward/mean"] == one_row["reward/mean"]
    assert two_row["policy/grad_norm"] == pytest.approx(one_row["policy/grad_norm"], rel=1e-4)
    assert verify_run(two) == []


def test_several_turns_with_an_image_in_each(train):
    lake = train("lake", *SMALL, "data.heldout_size=4", "evaluate.samples=1", recipe=ROOT / "recipes/frozen_lake.yaml")
    assert verify_run(lake) == []
    rows = [row for row in read_lines(lake.metrics) if row["step"] > 0]
    assert all(row["policy/logprob_gap_max"] < 1e-4 for row in rows)
    assert all(row["rollout/prompt_tokens_mean"] > 40 for row in rows)  # more than one image of nine tokens


def test_full_parameter_training(train):
    full = train("full", *SMALL, "adapter.kind=full", "optimizer.learning_rate=1e-4", "evaluate.every_steps=0")
    rows = [row for row in read_lines(full.metrics) if row["step"] > 0]
    assert all(row["policy/logprob_gap_max"] < 1e-4 for row in rows)
    assert verify_run(full) == []


def driver_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    children = psutil.Process(process.pid).children()
    return next(child for child in children if "argusrl.training.driver" in " ".join(child.cmdline()))
