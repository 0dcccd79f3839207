from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
import yaml

from argusrl.cluster.manifests.recipe import LARGEST_BYTES, PodFiles
from argusrl.config.load import load_config
from argusrl.config.sections import Config
from argusrl.errors import ConfigError
from fakes.kubernetes_recipe import kubernetes_config, rendered

MOUNT = Path("/fsx")


def plain(*overrides: str) -> Config:
    """The reference recipe without files of its own."""
    return kubernetes_config("environment.factory=null", "environment.id=FrozenLake-v1", *overrides)


def environment(factory: str) -> list[str]:
    return [
        "environment.kind=python",
        f"environment.factory={factory}",
        "rewards=[{kind: environment, weight: 1.0}]",
    ]


def test_pods_load_the_recipe_that_was_rendered(tmp_path: Path) -> None:
    config = plain()
    path = tmp_path / "recipe.yaml"
    path.write_text(rendered(config)["ConfigMap"]["data"]["recipe.yaml"])
    assert load_config(path).config == config


def test_user_files_travel_with_what_they_import(tmp_path: Path) -> None:
    (tmp_path / "maze.py").write_text("import json\nimport walls\nfrom doors import Door\n\nclass Maze: ...\n")
    (tmp_path / "walls.py").write_text("import maze\n")
    (tmp_path / "doors.py").write_text("class Door: ...\n")
    (tmp_path / "unused.py").write_text("secret = 1\n")
    config = plain(*environment(f"{tmp_path / 'maze.py'}:Maze"))
    objects = rendered(config)
    files = objects["ConfigMap"]["data"]
    assert yaml.safe_load(files["recipe.yaml"])["environment"]["factory"] == "/etc/argusrl/files/0/maze.py:Maze"
    (volume,) = [
        volume
        for volume in objects["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]
        if volume["name"] == "recipe"
    ]
    places = {item["path"]: files[item["key"]] for item in volume["configMap"]["items"]}
    assert set(places) == {"recipe.yaml", "files/0/maze.py", "files/0/walls.py", "files/0/doors.py"}
    assert places["files/0/maze.py"] == (tmp_path / "maze.py").read_text()
    assert "unused" not in str(files.keys())
    assert volume["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]


def test_files_of_the_same_name_from_two_folders(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "score.py").write_text(f"def {name}(**_): return 1.0\n")
    rewards = [f"{{kind: python, name: {name}, function: '{tmp_path / name / 'score.py'}:{name}'}}" for name in "ab"]
    files = PodFiles(plain(f"rewards=[{', '.join(rewards)}]"), MOUNT)
    functions = [reward["function"] for reward in yaml.safe_load(files.texts["recipe.yaml"])["rewards"]]
    assert functions == ["/etc/argusrl/files/0/score.py:a", "/etc/argusrl/files/1/score.py:b"]
    assert len(files.data) == 3


def test_names_that_no_key_may_have(tmp_path: Path) -> None:
    for name in ("größe", "gröse"):
        (tmp_path / f"{name}.py").write_text(f"# {name}\n")
    rewards = [f"{{kind: python, name: {n}, function: '{tmp_path / n}.py:f'}}" for n in ("größe", "gröse")]
    files = PodFiles(plain(f"rewards=[{', '.join(rewards)}]"), MOUNT)
    assert all(key.isascii() for key in files.data)
    assert {item["path"]: files.data[item["key"]] for item in files.items}["files/0/größe.py"] == "# größe\n"


def test_a_template_of_chats_travels_too(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}\n")
    files = PodFiles(plain(f"model.chat_template={template}"), MOUNT, PurePosixPath("/elsewhere"))
    assert yaml.safe_load(files.texts["recipe.yaml"])["model"]["chat_template"] == "/elsewhere/files/0/chat.jinja"


def test_what_pods_do_not_see_is_said_at_once(tmp_path: Path) -> None:
    config = plain(
        "model.path=/fsx/model",
        "adapter.initial=/fsx/adapter",
        "data={kind: files, train: /fsx/train.parquet, heldout: /fsx/heldout.parquet}",
    )
    with pytest.raises(ConfigError) as caught:
        PodFiles(config, Path("/elsewhere"))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "model.path",
        "adapter.initial",
        "data.train",
        "data.heldout",
    ]


def test_a_package_beside_the_file_is_not_half_taken(tmp_path: Path) -> None:
    (tmp_path / "maze.py").write_text("from walls.brick import Brick\n")
    (tmp_path / "walls").mkdir()
    (tmp_path / "walls" / "__init__.py").touch()
    with pytest.raises(ConfigError, match="imports the package"):
        PodFiles(plain(*environment(f"{tmp_path / 'maze.py'}:Maze")), MOUNT)


def test_files_on_the_shared_file_system_stay_there() -> None:
    files = PodFiles(plain(*environment("/fsx/code/maze.py:Maze")), MOUNT)
    assert list(files.texts) == ["recipe.yaml"]
    assert yaml.safe_load(files.texts["recipe.yaml"])["environment"]["factory"] == "/fsx/code/maze.py:Maze"


def test_a_large_file_belongs_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "big.py").write_text("#" * LARGEST_BYTES)
    with pytest.raises(ConfigError, match="a ConfigMap holds"):
        PodFiles(plain(*environment(f"{tmp_path / 'big.py'}:Maze")), MOUNT)


def test_another_recipe_is_another_map() -> None:
    names = {rendered(plain(f"run.seed={seed}"))["ConfigMap"]["metadata"]["name"] for seed in (1, 1, 2)}
    assert len(names) == 2
