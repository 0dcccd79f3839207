from __future__ import annotations

from pathlib import Path

import pytest

from argusrl.config.known_models import KNOWN_MODELS, known_config
from argusrl.config.model_shape import ModelShape

PARAMETERS = {"2B": 2_127_532_032, "4B": 4_437_815_808, "8B": 8_767_123_696, "32B": 33_357_390_064}


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_published_models_have_their_number_of_parameters(name: str) -> None:
    config = known_config(f"/fsx/models/{name}/")
    assert config is not None
    assert ModelShape.from_json(config).parameters == PARAMETERS[name.split("-")[2]]


def test_a_folder_that_is_there_is_read_whatever_its_name(tmp_path: Path, tiny_model: Path) -> None:
    link = tmp_path / "Qwen3-VL-8B-Instruct"
    link.symlink_to(tiny_model)
    assert ModelShape.find(str(link)).parameters < 10_000_000
    assert ModelShape.find(f"{tmp_path}/gone/Qwen3-VL-8B-Instruct").parameters == PARAMETERS["8B"]
    assert ModelShape.find("Qwen/Qwen3-VL-8B-Instruct").parameters == PARAMETERS["8B"]
    assert known_config("Qwen/Qwen3-VL-9B-Instruct") is None
