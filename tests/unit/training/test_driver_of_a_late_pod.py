"""A driver in a pod that wakes up when its run was given to the cluster again: it ends before it touches anything."""

from __future__ import annotations

import asyncio
import os

import pytest

from argusrl.cluster.names import SUBMISSION_VARIABLE
from argusrl.config.load import load_config
from argusrl.errors import FencedError
from argusrl.journal.epochs import newest_epoch
from argusrl.journal.submissions import RAY_JOB_KIND, Submission, record_submission
from argusrl.storage.layout import RunFolder
from argusrl.training import driver
from fakes.controlled_run import RECIPE


def submitted(run: RunFolder, number: int) -> None:
    record = Submission(
        number=number, name=f"maze-s{number}", namespace="team", kind=RAY_JOB_KIND, text="", time=0.0, manifest={},
        reason="first" if number == 1 else "head_lost",
    )  # fmt: skip
    record_submission(run, record)


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunFolder:
    """Of which this process is the driver of submission 1. Nothing after the claim of an epoch can work."""
    folder = RunFolder(tmp_path / "maze")
    submitted(folder, 1)
    monkeypatch.setitem(os.environ, SUBMISSION_VARIABLE, "1")
    monkeypatch.setattr(driver, "ray_environment", lambda config: {})
    monkeypatch.setattr(driver, "sweep_temporaries", lambda folder: pytest.fail("it goes on"))
    return folder


def drive(run: RunFolder) -> None:
    late = driver._Driver(run, 1, run.path / "logs", config=load_config(RECIPE, []).config)
    asyncio.run(late.run())


def test_it_claims_nothing(run):
    submitted(run, 2)
    with pytest.raises(FencedError, match="given to the cluster again as submission 2"):
        drive(run)
    assert newest_epoch(run) == 0


def test_it_looks_again_after_its_claim(run, monkeypatch):
    """Or a claim right after the fence would be above it."""
    claim = driver.claim_epoch

    def claim_late(*arguments):
        submitted(run, 2)
        return claim(*arguments)

    monkeypatch.setattr(driver, "claim_epoch", claim_late)
    with pytest.raises(FencedError, match="submission 2"):
        drive(run)
