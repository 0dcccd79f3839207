"""What every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.register_assert_rewrite("contracts.engine_contract")

TINY_MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3vl"


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the tiny Qwen3-VL that ships with the project."""
    if not (TINY_MODEL / "config.json").is_file():
        pytest.skip(f"{TINY_MODEL} is missing: scripts/make_tiny_model.py makes it")
    return TINY_MODEL
