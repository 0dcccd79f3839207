import datetime
from decimal import Decimal

import pytest

from argusrl.config.sections import ColumnSection, DataSection
from argusrl.data.formats import check_columns, plain, row_format
from argusrl.errors import ConfigError, DataError


def test_own_columns():
    columns = ColumnSection(prompt="question", images="picture", answer="gold", id="key", info=["level"])
    mapping = row_format(DataSection(train="x", columns=columns))
    assert mapping.required == ("question", "picture", "gold", "key", "level")
    assert mapping.columns == ("question", "picture", "gold", "key", "level")
    parts = mapping.parts({"question": "q", "picture": b"p", "gold": "4", "key": 9, "level": 2, "other": 1})
    assert (parts.prompt, parts.images, parts.answer, parts.id, parts.info) == ("q", b"p", "4", 9, {"level": 2})


def test_default_columns_but_the_prompt_may_be_absent():
    mapping = row_format(DataSection(train="x"))
    assert mapping.required == ("prompt",)
    parts = mapping.parts({"prompt": "q"})
    assert (parts.images, parts.answer, parts.id) == (None, None, None)


def test_no_images_column():
    mapping = row_format(DataSection(train="x", columns=ColumnSection(images=None, answer=None)))
    assert mapping.columns == ("prompt",)
    assert mapping.parts({"prompt": "q", "images": b"p"}).images is None


def test_missing_columns_are_all_named_with_their_nearest():
    with pytest.raises(ConfigError) as caught:
        check_columns(["prompt", "imges", "gold"], ["prompt", "images"], "train.parquet")
    assert caught.value.problems == [
        "train.parquet has no column 'imges': did you mean 'images'?",
        "train.parquet has no column 'gold'",
    ]


def test_plain():
    value = {"a": (1, 2.5, None, True), "when": datetime.date(2026, 1, 2), "d": Decimal("1.5"), "n": float("nan")}
    assert plain(value, "c") == {"a": [1, 2.5, None, True], "when": "2026-01-02", "d": 1.5, "n": None}
    with pytest.raises(DataError, match=r"column c.x holds bytes"):
        plain({"x": b""}, "c")


def test_a_scoring_column_that_is_no_mapping_is_a_bad_row():
    for name, column in [("verl", "reward_model"), ("skyrl", "reward_spec")]:
        mapping = row_format(DataSection(train="x", format=name))
        with pytest.raises(DataError, match=f"column {column} holds str"):
            mapping.parts({"prompt": "q", column: "4"})
        assert mapping.parts({"prompt": "q", column: None}).answer is None


def test_more_info_columns_of_a_ready_format():
    mapping = row_format(DataSection(train="x", format="verl", columns=ColumnSection(info=["agent_name"])))
    assert mapping.required == ("prompt", "reward_model", "agent_name")
    parts = mapping.parts({"prompt": "q", "reward_model": {"ground_truth": "4"}, "agent_name": "a"})
    assert parts.info == {"agent_name": "a"}


def test_trl_answers_and_info():
    mapping = row_format(DataSection(train="x", format="trl"))
    parts = mapping.parts({"prompt": "q", "image": b"p", "solution": "4", "answer": "four", "raw": b"x"})
    assert (parts.images, parts.answer, parts.info) == (b"p", "4", {"answer": "four"})
