from __future__ import annotations

import base64
import json
import os
import zlib
from pathlib import Path

import pytest

from argusrl.cluster import packed_recipe
from argusrl.cluster.packed_recipe import VARIABLE, pack, unpack
from argusrl.errors import ConfigError


def test_files_come_out_where_every_node_sees_them(tmp_path: Path) -> None:
    variables = pack({"recipe.yaml": "run: {}\n", "files/0/rewards.py": "def ü(): ...\n"}, tmp_path, "Maze 1")
    recipe = unpack(variables[VARIABLE])
    assert recipe.read_text() == "run: {}\n"
    assert (recipe.parent / "files/0/rewards.py").read_text() == "def ü(): ...\n"
    assert recipe.parent.parent == tmp_path / ".recipes"


def test_the_place_is_the_same_for_every_submission_of_a_run(tmp_path: Path) -> None:
    first = unpack(pack({"recipe.yaml": "a: 1"}, tmp_path, "maze")[VARIABLE])
    second = unpack(pack({"recipe.yaml": "a: 2"}, tmp_path, "maze")[VARIABLE])
    assert first == second
    assert second.read_text() == "a: 2"


def test_the_same_files_give_the_same_variable(tmp_path: Path) -> None:
    assert pack({"a": "1", "b": "2"}, tmp_path, "maze") == pack({"b": "2", "a": "1"}, tmp_path, "maze")


def test_files_that_are_too_large_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="characters when packed") as caught:
        pack({"recipe.yaml": base64.b64encode(os.urandom(200_000)).decode()}, tmp_path, "maze")
    assert "shared file system" in caught.value.hint


@pytest.mark.parametrize("text", ["", "nonsense", base64.b64encode(zlib.compress(b"{}")).decode()])
def test_what_is_no_recipe_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ConfigError, match="holds no packed recipe"):
        unpack(text)


def test_names_cannot_lead_elsewhere(tmp_path: Path) -> None:
    body = json.dumps({"root": str(tmp_path), "run": "maze", "files": {"../../x": "y"}})
    with pytest.raises(ConfigError, match="outside of its folder"):
        unpack(base64.b64encode(zlib.compress(body.encode())).decode())
    assert not (tmp_path.parent / "x").exists()


def test_it_becomes_argusrl_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became = []
    monkeypatch.setattr(os, "execv", lambda path, words: became.append(words))
    monkeypatch.setenv(VARIABLE, pack({"recipe.yaml": "a: 1"}, tmp_path, "maze")[VARIABLE])
    packed_recipe.main()
    assert became[0][1:] == ["-m", "argusrl.cli.main", "train", str(tmp_path / ".recipes/maze/recipe.yaml")]
    assert VARIABLE not in os.environ
    with pytest.raises(SystemExit, match="is not set"):
        packed_recipe.main()
