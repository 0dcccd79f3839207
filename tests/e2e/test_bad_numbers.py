"""Numbers that are not finite, and an update that kills whoever begins it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from argusrl.journal.commits import CommitChain
from argusrl.journal.verify import verify_run
from argusrl.storage.publish import read_lines
from e2e.started import REAL_FAULTS, Started

pytestmark = REAL_FAULTS
HERE = Path(__file__).parent


def test_weights_that_are_no_numbers_end_the_run_and_reach_no_engine(runs):
    run = Started(runs, "infinite", "optimizer.learning_rate=1e25")
    assert run.end() == 10, run.log.read_text()
    assert run.says("NaN or Inf") or run.says("not finite")
    assert run.verdict().error == "NumericsError"
    assert verify_run(run.folder) == []  # and what is committed is finite


def test_an_adapter_to_start_from_that_is_no_numbers_is_refused(calm, runs, tmp_path):
    broken = tmp_path / "adapter"
    shutil.copytree(calm.absolute(CommitChain(calm).head().adapter.path), broken)
    tensors = load_file(broken / "adapter_model.safetensors")
    first = min(tensors)
    tensors[first] = torch.full_like(tensors[first], torch.nan)
    save_file(tensors, broken / "adapter_model.safetensors", metadata={"format": "pt"})
    run = Started(runs, "initial", f"adapter.initial={broken}")
    assert run.end() in (4, 10), run.log.read_text()
    assert run.says("NaN or Inf")
    assert not run.folder.commit(0).exists()


def test_a_reward_that_is_no_number_fails_that_sample_alone(runs):
    reward = f"{{kind: python, function: '{HERE / 'user_code.py'}:sometimes_nan'}}"
    run = Started(runs, "nan-reward", f"rewards=[{reward}]", "rollout.max_failed_share=0.9", "evaluate.every_steps=0")
    assert run.end() == 0, run.log.read_text()
    commits = [CommitChain(run.folder).read(step) for step in (1, 2, 3)]
    failures = [failure for commit in commits for failure in commit.failures]
    assert failures
    assert all("not finite" in failure.message for failure in failures)
    assert [len(commit.trajectories) + len(commit.failures) for commit in commits] == [32, 32, 32]
    assert all(row["policy/grad_norm"] >= 0 for row in read_lines(run.folder.metrics) if row["step"])
    assert not run.events("fault")
    assert verify_run(run.folder) == []


def test_a_crash_that_every_update_meets_ends_the_run_with_the_reason(runs):
    path = os.pathsep.join([str(HERE / "crash"), os.environ.get("PYTHONPATH", "")])
    run = Started(runs, "crash", PYTHONPATH=path)
    assert run.end() == 9, run.log.read_text()
    assert run.says("trying again would not help")
    assert run.says("rank 0")
    assert len(run.events("attempt")) == 3
    assert {fault["fault"] for fault in run.events("fault")} == {"rank"}
    assert CommitChain(run.folder).head().step == 0
    assert verify_run(run.folder) == []
