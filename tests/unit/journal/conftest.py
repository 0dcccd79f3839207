from __future__ import annotations

import pytest

from argusrl.storage.layout import RunFolder
from fakes.run_folder import RunBuilder, memory_folder


@pytest.fixture
def tmp_path():
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def builder(tmp_path) -> RunBuilder:
    return RunBuilder(tmp_path)
