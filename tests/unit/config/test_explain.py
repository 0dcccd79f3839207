from __future__ import annotations

import pytest

from argusrl.config.explain import explain, keys, schema, suggestions
from argusrl.errors import ConfigError


def test_a_key_tells_type_default_and_help() -> None:
    (found,) = explain("algorithm.group_size")
    assert found.type == "a whole number of at least 1"
    assert found.default == 8
    assert not found.required
    assert found.help == "Trajectories per prompt."


def test_choices_constraints_and_required_keys() -> None:
    assert explain("adapter.kind")[0].choices == ("lora", "full")
    assert explain("rollout.max_failed_share")[0].type == "a number from 0 to 1"
    assert explain("model.path")[0].required
    assert explain("run.root")[0].default == "runs"


@pytest.mark.parametrize("text", ["rewards.weight", "rewards.0.weight", "rewards.*.weight"])
def test_items_of_lists_are_reached_by_any_index(text: str) -> None:
    assert [found.path for found in explain(text)] == ["rewards.*.weight"]


def test_a_section_tells_all_its_keys_nested_ones_too() -> None:
    names = [found.path for found in explain("data")]
    assert "data.train" in names
    assert "data.columns.prompt" in names


def test_an_unknown_key_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"did you mean algorithm\.group_size"):
        explain("algorithm.group_sise")
    assert suggestions("learning_rate") == ["optimizer.learning_rate"]


def test_the_schema_covers_every_section_and_refuses_unknown_keys() -> None:
    document = schema()
    sections = {key.path.partition(".")[0] for key in keys()}
    assert sections | {"base"} == set(document["properties"])
    assert document["additionalProperties"] is False
