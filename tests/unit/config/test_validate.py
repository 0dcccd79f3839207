from __future__ import annotations

from typing import Any

import pytest
from sound_recipes import SOUND

from argusrl.config.validate import validate
from argusrl.errors import ConfigError


def problems(**sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate({**SOUND, **sections})
    return caught.value.problems


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"algorithm": {"group_sise": 8}}, "algorithm.group_sise: unknown key; did you mean algorithm.group_size?"),
        ({"algorithm": {"temperature": 1}}, "algorithm.temperature: unknown key; did you mean rollout.temperature?"),
        ({"optimiser": {}}, "optimiser: unknown key; did you mean optimizer?"),
        (
            {"rewards": [{"kind": "exact", "wieght": 1}]},
            "rewards.0.wieght: unknown key; did you mean rewards.*",
        ),
        ({"algorithm": {"group_size": "8"}}, 'algorithm.group_size: must be a whole number of at least 1, got "8"'),
        ({"algorithm": {"group_size": 8.5}}, "algorithm.group_size: must be a whole number of at least 1, got 8.5"),
        ({"algorithm": {"group_size": True}}, "algorithm.group_size: must be a whole number of at least 1, got true"),
        ({"adapter": {"kind": "lorra"}}, 'adapter.kind: must be one of lora, full, got "lorra"'),
        ({"optimizer": {"epsilon": float("nan")}}, "optimizer.epsilon: must be a number above 0, got NaN"),
        (
            {"optimizer": {"betas": [0.9]}},
            "optimizer.betas: must be a list of 2 values, each a number",
        ),
        ({"environment": {"actions": {"up": "x"}}}, 'environment.actions.up: must be a whole number, got "x"'),
        ({"adapter": {"target": [1]}}, "adapter.target: must be language or a list of values, each text, got [1]"),
        ({"rewards": []}, "rewards: must be a list of sections (at least one), got []"),
        ({"rewards": [{}]}, "rewards.0.kind: missing (Which reward; environment takes what the environment paid)"),
        ({"evaluate": 3}, "evaluate: must be a section with the keys "),
    ],
)
def test_each_mistake_is_one_line_with_the_value_and_what_would_be_right(
    sections: dict[str, Any], message: str
) -> None:
    found = problems(**sections)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_all_mistakes_come_at_once() -> None:
    found = problems(algorithm={"group_sise": 8, "num_steps": 0}, adapter={"rank": "x"}, runn={})
    assert {line.partition(":")[0] for line in found} == {
        "algorithm.group_sise",
        "algorithm.num_steps",
        "adapter.rank",
        "runn",
    }


def test_missing_sections_name_the_keys_they_need() -> None:
    with pytest.raises(ConfigError) as caught:
        validate({})
    assert [line.partition(": missing")[0] for line in caught.value.problems] == ["model.path", "data", "rewards"]


def test_a_section_with_nothing_under_it_is_its_defaults() -> None:
    assert validate({**SOUND, "observe": None}) == validate(SOUND)


def test_values_that_may_be_secrets_are_not_shown() -> None:
    found = problems(rewards=[{"kind": "http", "token": {"x": "hunter2"}}], cluster={"environment": {"A": ["hunter2"]}})
    assert len(found) == 2
    assert "hunter2" not in "".join(found)


def test_whole_numbers_serve_as_numbers_and_text_as_paths() -> None:
    config = validate({**SOUND, "optimizer": {"learning_rate": 1}, "run": {"root": "x/y"}})
    assert config.optimizer.learning_rate == 1.0
    assert config.run.root.name == "y"
