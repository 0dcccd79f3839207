"""Tests of what only a GPU can show. They skip where there is none.

ARGUSRL_REHEARSE_GPU=1 runs them on the CPU with the same code, to find mistakes in the tests themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.benchmark import load_benchmark

REHEARSED = os.environ.get("ARGUSRL_REHEARSE_GPU") == "1"


@pytest.fixture(scope="session")
def device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if REHEARSED:
        return "cpu"
    pytest.skip("needs a CUDA GPU: torch sees none here (ARGUSRL_REHEARSE_GPU=1 runs the test's code on the CPU)")


@pytest.fixture(scope="session")
def real(device: str) -> bool:
    """Whether this is a GPU, and no rehearsal."""
    return device == "cuda"


@pytest.fixture
def one_rank(device: str) -> Iterator[None]:
    with load_benchmark("gpu_training").process_group(device):
        yield


@pytest.fixture
def make_policy(device: str, one_rank: None, tmp_path: Path) -> Callable[..., Any]:
    """(dtype, checkpointing=False, **sizes of the text model) -> RandomPolicy with the same weights every time."""
    bench = load_benchmark("gpu_training")

    def make(dtype: str, checkpointing: bool = False, **text: int) -> Any:
        config = bench.SMALL | {"text_config": bench.SMALL["text_config"] | text}
        config["vision_config"] = config["vision_config"] | {"out_hidden_size": config["text_config"]["hidden_size"]}
        folder = tmp_path / f"{dtype}{checkpointing}"
        folder.mkdir()
        made = bench.RandomPolicy.make(folder, config, device=device, dtype=dtype)
        made.scorer.train(checkpointing)
        return made

    return make
