from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from argusrl.config.yaml_file import dump_yaml, parse_yaml, read_yaml_mapping
from argusrl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.5e3", 1500.0),
        ("-.5", -0.5),
        ("16_384", 16384),
        ("0x1F", 31),
        ("true", True),
        ("null", None),
        ("", None),
        ("yes", "yes"),
        ("no", "no"),
        ("off", "off"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("e5", "e5"),
    ],
)
def test_scalars_mean_what_they_look_like(text: str, value: Any) -> None:
    found = parse_yaml(text, "here")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3", ["line 3", "'a'", "first on line 1"]),
        ("x:\n  a: 1\n  a: 2", ["line 3", "'a'"]),
        ("1: x", ["line 1", "not text"]),
        ("a: [1", ["line 1", "column", "not YAML"]),
        ("a: !!python/object:os.system x", ["not YAML"]),
        ("a: b: c", ["line 1, column 5"]),
    ],
)
def test_mistakes_name_their_line(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "recipe.yaml")
    assert "recipe.yaml" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_anchors_and_merge_keys_are_no_duplicates() -> None:
    text = "base: &base {a: 1, b: 2}\nother:\n  <<: *base\n  a: 3"
    assert parse_yaml(text, "x") == {"base": {"a": 1, "b": 2}, "other": {"a": 3, "b": 2}}


def test_a_file_must_be_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="a recipe is a mapping"):
        read_yaml_mapping(file)
    file.write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_yaml_mapping(file)
    with pytest.raises(ConfigError, match="is a folder"):
        read_yaml_mapping(tmp_path)
    with pytest.raises(ConfigError, match="no such recipe"):
        read_yaml_mapping(tmp_path / "none.yaml")
    file.write_text("# only a comment\n")
    assert read_yaml_mapping(file) == {}


_TRICKY = st.sampled_from(
    ["1e-5", "yes", "010", "0x1F", "~", "", "1:30", "2020-01-01", "1_0", "<<", "=", "-.5e3", "null"]
)
_TEXT = _TRICKY | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20)
_LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT
_VALUE = st.recursive(_LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3))


@given(st.dictionaries(_TEXT, _VALUE, max_size=4))
def test_what_is_written_is_read_back_by_this_loader_and_by_pyyaml(value: dict[str, Any]) -> None:
    text = dump_yaml(value)
    assert parse_yaml(text, "x") == value
    assert yaml.safe_load(text) == value


@pytest.mark.parametrize("text", ["a: &x [*x]", "&x\na: *x", "a: &x {b: {c: *x}}"])
def test_a_value_inside_itself_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="recursive"):
        parse_yaml(text, "recipe.yaml")


def test_an_anchor_may_be_used_again() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: *x", "recipe.yaml") == {"a": {"b": 1}, "c": {"b": 1}}
