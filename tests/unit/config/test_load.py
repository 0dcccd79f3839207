from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from sound_recipes import SOUND, sound, write

from argusrl.config.load import (
    config_difference,
    digest,
    load_config,
    merge,
    pinned,
    read_resolved,
    resumed,
    write_resolved,
)
from argusrl.errors import ConfigError, CorruptionError


def test_bases_are_merged_in_order_and_the_recipe_wins(tmp_path: Path) -> None:
    write(tmp_path / "deep.yaml", {**SOUND, "algorithm": {"num_steps": 1, "group_size": 2, "prompts_per_step": 3}})
    write(tmp_path / "shared" / "a.yaml", {"base": "../deep.yaml", "algorithm": {"num_steps": 10}})
    write(tmp_path / "b.yaml", {"algorithm": {"group_size": 20}, "run": {"seed": 5}})
    recipe = write(
        tmp_path / "mine.yaml",
        {"base": ["shared/a.yaml", "b.yaml"], "rewards": [{"kind": "math"}], "run": {"deterministic": True}},
    )
    loaded = load_config(recipe)
    algorithm = loaded.config.algorithm
    assert (algorithm.num_steps, algorithm.group_size, algorithm.prompts_per_step) == (10, 20, 3)
    assert loaded.config.run.seed == 5
    assert loaded.config.run.deterministic
    assert [reward.kind for reward in loaded.config.rewards] == ["math"]  # lists are replaced
    assert [path.name for path in loaded.sources] == ["deep.yaml", "a.yaml", "b.yaml", "mine.yaml"]
    assert loaded.digest == digest(loaded.config)


def test_a_circle_of_bases_and_a_missing_base_are_errors(tmp_path: Path) -> None:
    recipe = write(tmp_path / "a.yaml", {"base": "b.yaml"})
    write(tmp_path / "b.yaml", {"base": "a.yaml"})
    with pytest.raises(ConfigError, match=r"circle.*a\.yaml → .*b\.yaml → .*a\.yaml"):
        load_config(recipe)
    write(tmp_path / "b.yaml", {"base": "gone.yaml"})
    with pytest.raises(ConfigError, match=r"no such file: .*gone\.yaml"):
        load_config(recipe)
    write(tmp_path / "b.yaml", {"base": 3})
    with pytest.raises(ConfigError, match="base must be a file name"):
        load_config(recipe)


def test_an_empty_section_header_keeps_what_the_base_said() -> None:
    assert merge({"run": {"seed": 3}}, {"run": None}) == {"run": {"seed": 3}}
    assert merge({"observe": {"wandb": {"project": "x"}}}, {"observe": {"wandb": None}}) == {"observe": {"wandb": None}}


def test_overrides_are_yaml_and_reach_into_lists(tmp_path: Path) -> None:
    recipe = write(tmp_path / "mine.yaml", SOUND)
    overrides = [
        "rewards.0.weight=2",
        "optimizer.learning_rate=1e-4",
        "optimizer.betas=[0.8, 0.95]",
        "cluster.environment.NAME='7'",
        "data.suffix=a = b",
        "evaluate.stop_at=null",
    ]
    config = load_config(recipe, overrides).config
    assert config.rewards[0].weight == 2.0
    assert config.optimizer.learning_rate == 1e-4
    assert config.optimizer.betas == (0.8, 0.95)
    assert config.cluster.environment == {"NAME": "7"}
    assert config.data.suffix == "a = b"


def test_wrong_overrides_are_listed_together(tmp_path: Path) -> None:
    recipe = write(tmp_path / "mine.yaml", SOUND)
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, ["foo", "rewards.3.weight=2", "rewards.x=1", "run.seed=[", "model.path.x=1", "base=x"])
    assert len(caught.value.problems) == 6
    assert "rewards is a list; '3' is none of its indices (0 to 0)" in caught.value.problems[1]


def test_a_misspelt_override_is_caught_like_a_misspelt_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean algorithm\.group_size"):
        load_config(write(tmp_path / "mine.yaml", SOUND), ["algorithm.groupsize=4"])


def test_the_run_is_named_after_the_recipe(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "my maze.v2.yaml", SOUND)).config.run.name == "my-maze.v2"
    assert load_config(write(tmp_path / "x.yaml", SOUND), ["run.name=other"]).config.run.name == "other"


def test_rules_between_values_are_checked_on_loading(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="group_size 1"):
        load_config(write(tmp_path / "x.yaml", SOUND), ["algorithm.group_size=1"])


def test_paths_are_found_beside_the_file_that_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, recipes, work = tmp_path / "shared", tmp_path / "recipes", tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for file in (
        shared / "task.py",
        recipes / "reward.py",
        work / "reward.py",
        work / "rows.jsonl",
        recipes / "m" / "x",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    write(shared / "base.yaml", SOUND)
    recipe = write(
        recipes / "mine.yaml",
        {
            "base": "../shared/base.yaml",
            "model": {"path": "m"},
            "data": {"heldout": "rows.jsonl", "train": "absent.jsonl"},
            "rewards": [{"kind": "python", "function": "reward.py:score"}, {"kind": "exact"}],
        },
    )
    config = load_config(recipe).config
    assert config.data.generator == f"{shared / 'task.py'}:make"  # beside the base
    assert config.rewards[0].function == f"{recipes / 'reward.py'}:score"  # the recipe's folder wins
    assert str(config.data.heldout) == str(work / "rows.jsonl")  # then the working folder
    assert str(config.data.train) == "absent.jsonl"  # left as it is
    assert config.model.path == str(recipes / "m")
    assert load_config(recipe, ["model.path=Qwen/Qwen3-VL-8B-Instruct"]).config.model.path.startswith("Qwen/")


def test_the_resolved_config_is_read_back_and_notices_changes(tmp_path: Path) -> None:
    config = sound(environment={"action_pattern": "(1e-5)"}, data={"suffix": "1e-5"})
    path = tmp_path / "config.yaml"
    written = write_resolved(config, path)
    assert read_resolved(path) == written == pinned(config)
    document = yaml.safe_load(path.read_text())
    assert document["format_version"] == 1
    assert document["sha256"] == digest(written)
    path.write_text(path.read_text().replace("group_size: 8", "group_size: 9"))
    with pytest.raises(CorruptionError, match="sha256"):
        read_resolved(path)
    path.write_text("format_version: 2\n")
    with pytest.raises(ConfigError, match="format version 2"):
        read_resolved(path)


@pytest.mark.parametrize(
    "content", [b"", b"\x93\x00", b"a: [", b"- 1", b"config: {}", b"format_version: 1\nsha256: 7\n"]
)
def test_what_is_no_resolved_config_any_more_is_corruption(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(CorruptionError, match=r"config\.yaml"):
        read_resolved(path)
    path.unlink()
    with pytest.raises(ConfigError, match="no such"):
        read_resolved(path)


def test_the_config_of_a_run_folder_is_a_recipe_of_that_run(tmp_path: Path) -> None:
    config = load_config(write(tmp_path / "maze.yaml", SOUND)).config
    (tmp_path / "runs").mkdir()
    resolved = tmp_path / "runs" / "config.yaml"
    written = write_resolved(config, resolved)
    assert load_config(resolved).config == written
    longer = load_config(resolved, ["algorithm.num_steps=77"]).config
    assert (longer.run.name, longer.algorithm.num_steps) == ("maze", 77)
    under = write(tmp_path / "other.yaml", {"base": "runs/config.yaml"})
    assert load_config(under).config.run.name == "other"
    resolved.write_text(resolved.read_text().replace("num_steps", "num_step"))
    with pytest.raises(CorruptionError, match="does not match its sha256"):
        load_config(resolved)


def test_the_difference_names_keys_with_both_values() -> None:
    old = sound(optimizer={"learning_rate": 1e-5})
    new = sound(optimizer={"learning_rate": 2e-5}, rewards=[{"kind": "exact"}, {"kind": "math"}])
    lines = config_difference(old, new)
    assert lines[0] == "optimizer.learning_rate: 1e-05 → 2e-05"
    assert 'rewards.1.kind: – → "math"' in lines
    assert config_difference(old, old) == []


def test_a_resume_may_change_what_touches_no_committed_step() -> None:
    recorded = pinned(sound(algorithm={"num_steps": 10}))
    wanted = sound(
        algorithm={"num_steps": 20}, cluster={"slots": 2}, observe={"display": "plain"}, evaluate={"samples": 3}
    )
    result = resumed(recorded, wanted)
    assert result.algorithm.num_steps == 20
    assert result.cluster.slots == 2
    assert result.optimizer.schedule_steps == 10  # the part that is committed keeps its shape


def test_a_resume_refuses_anything_else_and_says_what() -> None:
    recorded = pinned(sound())
    with pytest.raises(ConfigError) as caught:
        resumed(recorded, sound(algorithm={"group_size": 4}, optimizer={"learning_rate": 0.5}))
    text = str(caught.value)
    assert "algorithm.group_size: 8 → 4" in text
    assert "optimizer.learning_rate: 1e-05 → 0.5" in text
    assert "schedule_steps" not in text
