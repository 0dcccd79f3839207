"""Real runs of the command, small enough for a test. Each starts Ray, vLLM and FSDP2 in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from argusrl.storage.layout import RunFolder

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
SMALL = [
    "data.heldout_size=16",
    "algorithm.num_steps=3",
    "algorithm.prompts_per_step=8",
    "algorithm.group_size=4",
    "algorithm.updates_per_step=2",
    "evaluate.every_steps=3",
    "checkpoint.keep_adapters=10",
    "observe.display=plain",
]


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def argusrl(*words: str | Path, cwd: Path | None = None, timeout: float = 240) -> Result:
    """Run the command as a user does."""
    done = subprocess.run(
        command(*words),
        cwd=cwd or ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "argusrl.cli.main", *map(str, words)]


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run root of this test session."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def train(runs: Path) -> Callable[..., RunFolder]:
    """Train a recipe to its end; the run folder."""

    def run(name: str, *overrides: str, recipe: Path = QUICKSTART, options: tuple[str, ...] = ()) -> RunFolder:
        words = ["train", recipe, f"run.root={runs}", f"run.name={name}", *overrides, *options]
        result = argusrl(*words)
        assert result.code == 0, f"{result.out}\n{result.err}"
        return RunFolder(runs / name)

    return run


@pytest.fixture(scope="session")
def calm(train: Callable[..., RunFolder]) -> RunFolder:
    """A small run that nothing disturbed."""
    return train("calm", *SMALL)
