import sys
from pathlib import Path

import pytest

from argusrl.config.objects import load_object
from argusrl.errors import ConfigError


def problem(reference: str, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load_object(reference, **options)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(
        "calls = []\ncalls.append(1)\n\ndef score(reply):\n    return len(reply)\n\n"
        "class Box:\n    @staticmethod\n    def inner():\n        return 'inner'\n"
    )
    return path


def test_from_a_module():
    assert load_object("argusrl.errors:ConfigError") is ConfigError


def test_from_a_file_absolute_and_relative(file: Path):
    assert load_object(f"{file}:score")("abc") == 3
    assert load_object("rewards.py:score", base=file.parent)("abcd") == 4
    assert load_object("rewards.py:Box.inner", base=file.parent)() == "inner"


def test_a_file_is_executed_once(file: Path):
    first, second = load_object(f"{file}:calls"), load_object(f"{file}:calls")
    assert first is second
    assert first == [1]


def test_objects_of_a_file_can_be_pickled(file: Path):
    import pickle

    box = load_object(f"{file}:Box")
    assert pickle.loads(pickle.dumps(box)) is box


def test_a_file_may_import_its_neighbours(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "argusrl_test_neighbour.py").write_text("VALUE = 3\n")
    (tmp_path / "main.py").write_text("from argusrl_test_neighbour import VALUE\n")
    assert load_object("main.py:VALUE", base=tmp_path) == 3


def test_malformed_references():
    for reference in ("score", "rewards.py", ":score", "rewards.py:"):
        assert "is not a reference" in problem(reference)


def test_missing_file_names_the_nearest(file: Path):
    message = problem("reward.py:score", base=file.parent, field="rewards[0].function")
    assert message.startswith("rewards[0].function: there is no file")
    assert "did you mean" in message
    assert "rewards.py" in message


def test_missing_module():
    assert "there is no module 'argusrl_nowhere.rewards'" in problem("argusrl_nowhere.rewards:score")


def test_missing_attribute_names_the_nearest(file: Path):
    message = problem(f"{file}:scores")
    assert "has no 'scores'" in message
    assert "did you mean 'score'?" in message


def test_a_module_that_raises_is_not_a_missing_module(tmp_path: Path):
    (tmp_path / "broken.py").write_text("import argusrl_not_installed\n")
    message = problem("broken.py:score", base=tmp_path)
    assert "ModuleNotFoundError" in message
    assert "argusrl_not_installed" in message
    assert "raised" in problem("broken.py:score", base=tmp_path)  # again: nothing half loaded stays behind
