from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sound_recipes import sound

from argusrl.config.checks import file_problems, problems, require
from argusrl.errors import ConfigError

PLAIN = {"kind": "files", "train": "t.parquet", "heldout": "h.parquet"}
GAME = {"kind": "gymnasium", "id": "FrozenLake-v1", "actions": {"left": 0}, "max_turns": 5}
LEAKING = {**GAME, "starts": [{"seed": 1}], "heldout_starts": [{"seed": 2}, {"seed": 1}]}
STARTS = {"kind": "environment", "generator": None}


def test_a_sound_recipe_has_no_problem() -> None:
    assert problems(sound()) == []
    assert problems(sound(data=STARTS, environment=GAME, rewards=[{"kind": "environment"}])) == []
    assert problems(sound(cluster={"colocate": False, "slots": 4, "engines": 2})) == []


APART = {"colocate": False, "slots": 2, "engines": 1}


def test_two_live_versions_are_served_side_by_side() -> None:
    config = sound(rollout={"staleness": 1}, cluster=APART)
    assert problems(config) == []
    assert not config.serves_merged("float32")
    assert sound().serves_merged("float32")


@pytest.mark.parametrize(
    ("section", "merged"),
    [
        ({}, {"float32"}),
        ({"serving": "merged"}, {"float32", "bfloat16"}),
        ({"serving": "lora"}, set()),
        ({"kind": "full"}, set()),
    ],
)
def test_adapters_are_merged_by_themselves_where_nothing_is_rounded_away(
    section: dict[str, Any], merged: set[str]
) -> None:
    adapter = sound(adapter=section).adapter
    assert {dtype for dtype in ("float32", "bfloat16") if adapter.merged_in(dtype)} == merged
    assert not any(adapter.side_by_side().merged_in(dtype) for dtype in ("float32", "bfloat16"))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algorithm": {"group_size": 1}}, "group_size 1"),
        ({"algorithm": {"updates_per_step": 3, "prompts_per_step": 2}}, "updates_per_step (3)"),
        ({"algorithm": {"clip_low": 1.0}}, "clip_low"),
        ({"adapter": {"rank": 24}}, "24: vLLM does not serve this LoRA rank; it serves 1, 8, 16, 32"),
        ({"adapter": {"kind": "full", "initial": "x"}}, "adapter.initial"),
        ({"adapter": {"target": []}}, "adapter.target"),
        ({"adapter": {"kind": "full", "serving": "merged"}}, "adapter.serving merged"),
        ({"adapter": {"kind": "full"}, "algorithm": {"kl_weight": 0.1}}, "algorithm.kl_weight 0.1"),
        ({"model": {"max_tokens": 512}}, "rollout.max_response_tokens (512) leaves no room"),
        ({"rollout": {"max_prompt_tokens": 4000}}, "is more than model.max_tokens"),
        ({"model": {"min_pixels": 10, "max_pixels": 5}}, "min_pixels"),
        ({"data": {"kind": "files"}, "evaluate": {"every_steps": 0}}, "data.train"),
        ({"data": {"generator": None}}, "data.generator"),
        ({"data": {"generator": "nothing"}}, "module:name"),
        ({"data": {"train_size": None}}, "data.train_size"),
        ({"data": {"heldout_size": None}}, "data.heldout_size"),
        ({"data": {"kind": "files", "train": "t"}}, "data.heldout: evaluation needs held-out rows"),
        ({"data": {"kind": "files", "train": "t", "heldout": "t"}}, "same as data.train"),
        ({"data": {"kind": "environment"}}, "single_turn environment has no starts"),
        ({"data": {**STARTS, "train_size": None}, "environment": GAME}, "data.train_size"),
        ({"data": {**STARTS, "heldout_size": None}, "environment": GAME}, "data.heldout_size"),
        ({"environment": {"max_turns": 2}}, "environment.max_turns 2"),
        ({"environment": {"kind": "gymnasium", "actions": {"left": 0}}}, "environment.id"),
        ({"environment": {"kind": "gymnasium", "id": "FrozenLake-v1"}}, "environment.actions"),
        ({"environment": {"kind": "python"}}, "environment.factory"),
        ({"environment": {"action_pattern": "("}}, "not a regular expression"),
        ({"environment": {"action_pattern": "x"}}, "needs a group"),
        (
            {"environment": LEAKING},
            "items 1 are",
        ),
        ({"rewards": [{"kind": "python"}]}, "rewards.0.function"),
        ({"rewards": [{"kind": "http"}]}, "rewards.0.url"),
        ({"rewards": [{"kind": "http", "url": "ftp://x"}]}, "must be http"),
        ({"rewards": [{"kind": "http", "url": "http://a:b@x"}]}, "holds credentials"),
        (
            {"rewards": [{"kind": "http", "url": "http://x", "token": "hunter2"}]},
            "rewards.0.token: given in clear",
        ),
        ({"rewards": [{"kind": "format"}]}, "rewards.0.pattern"),
        ({"rewards": [{"kind": "exact", "pattern": "x"}]}, "needs a group"),
        ({"rewards": [{"kind": "exact", "function": "a:b"}]}, "only a python reward"),
        ({"rewards": [{"kind": "environment"}]}, "pays no reward"),
        ({"rewards": [{"kind": "exact"}, {"kind": "exact"}]}, "2 rewards are called 'exact'"),
        ({"rewards": [{"kind": "exact", "weight": 0}]}, "every weight is 0"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1"),
        ({"optimizer": {"warmup_steps": 101}}, "warmup_steps (101)"),
        ({"evaluate": {"every_steps": 0, "stop_at": 0.5}}, "evaluate.stop_at"),
        ({"rollout": {"pause_limit_seconds": 1}}, "pause_probe_seconds"),
        ({"environment": {"episode_timeout_seconds": 1}}, "step_timeout_seconds"),
        ({"rollout": {"staleness": 1}}, "set cluster.colocate: false"),
        (
            {"rollout": {"staleness": 1}, "cluster": APART, "adapter": {"serving": "merged"}},
            "set adapter.serving: lora",
        ),
        ({"rollout": {"staleness": 1}, "cluster": APART, "adapter": {"kind": "full"}}, "use kind lora"),
        (
            {"rollout": {"staleness": 1}, "cluster": APART, "algorithm": {"importance_cap": None}},
            "set algorithm.importance_cap",
        ),
        ({"cluster": {"engines": 1}}, "cluster.engines: only with colocate: false"),
        ({"cluster": {"colocate": False}}, "set cluster.slots"),
        ({"cluster": {"colocate": False, "slots": 2, "engines": 2}}, "must be below cluster.slots"),
        ({"cluster": {"device": "cpu"}, "engine": {"tensor_parallel": 2}}, "tensor_parallel"),
        ({"cluster": {"environment": {"HF_TOKEN": "hunter2"}}}, "cluster.environment.HF_TOKEN"),
        ({"cluster": {"environment": {"AWS_SECRET_ACCESS_KEY": "hunter2"}}}, "AWS_SECRET_ACCESS_KEY"),
    ],
)
def test_each_broken_rule_is_one_message(sections: dict[str, Any], words: str) -> None:
    found = problems(sound(**sections))
    assert len(found) == 1, found
    assert words in found[0]
    assert "hunter2" not in found[0]


def test_all_broken_rules_come_at_once() -> None:
    config = sound(algorithm={"group_size": 1}, adapter={"rank": 3}, rewards=[{"kind": "python"}])
    with pytest.raises(ConfigError) as caught:
        require(config)
    assert len(caught.value.problems) == 3


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    there = tmp_path / "there.parquet"
    there.touch()
    config = sound(
        model={"path": "./none"},
        data={"kind": "files", "train": str(there), "heldout": "gone.jsonl"},
        rewards=[{"kind": "python", "function": "gone.py:f"}, {"kind": "exact"}],
        environment={"kind": "python", "factory": "json:loads"},
    )
    assert [problem.partition(":")[0] for problem in file_problems(config)] == [
        "model.path",
        "data.heldout",
        "data.generator",
        "rewards.0.function",
    ]


def test_a_variable_about_tokens_is_no_secret() -> None:
    assert problems(sound(cluster={"environment": {"TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "8"}})) == []
