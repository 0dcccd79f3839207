"""Everything that can be wrong with model and data, told before an actor starts: the tiny model, files of a few
rows."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import sys
import traceback
from dataclasses import replace
from types import SimpleNamespace

import pytest
from PIL import Image as Pillow

from argusrl.config.validate import validate
from argusrl.errors import ArgusError, ConfigError, DataError, ModelError, WorkerError
from argusrl.training import checks
from argusrl.training.checks import (
    InputCheck,
    check_input,
    check_model_folder,
    decode_checked,
    encode_checked,
    prompt_limit,
    settings_for,
)


def encoded(size=(16, 16), mode="RGB", kind="PNG", **options) -> str:
    """An image as a data URI."""
    buffer = io.BytesIO()
    Pillow.new(mode, size).save(buffer, format=kind, **options)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def truncated() -> str:
    data = base64.b64decode(encoded((64, 64)).partition(",")[2])
    return "data:image/png;base64," + base64.b64encode(data[: len(data) // 2]).decode()


def animated() -> str:
    frames = [Pillow.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, format="GIF", save_all=True, append_images=frames[1:])
    return "data:image/gif;base64," + base64.b64encode(buffer.getvalue()).decode()


def row(number: int = 0, **changes) -> dict:
    return {"prompt": f"how many dots in {number}?", "images": [encoded()], "answer": str(number), **changes}


@pytest.fixture
def check(tmp_path, tiny_model):
    """check_input of a recipe with these training rows."""

    def checked(rows, heldout=None, **sections):
        files = {}
        for split, some in (("train", rows), ("heldout", heldout)):
            if some is not None:
                files[split] = str(tmp_path / f"{split}.jsonl")
                (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in some))
        values = {
            "model": {"path": str(tiny_model), "max_tokens": 128},
            "adapter": {"rank": 8},
            "data": files,
            "rewards": [{"kind": "exact"}],
            "algorithm": {"prompts_per_step": 1},
            "rollout": {"max_response_tokens": 16},
        }
        for name, change in sections.items():
            values[name] = {**values[name], **change} if isinstance(change, dict) else change
        return check_input(validate(values))

    return checked


def test_sound_rows_pass(check):
    checked = check([row(n) for n in range(3)], [row(n) for n in range(7, 9)])
    assert (checked.prompts, checked.heldout_prompts, checked.max_images, checked.warnings) == (3, 2, 1, ())
    assert checked.banned_ids
    assert not set(checked.banned_ids) & set(checked.end_ids)


def test_images_of_all_kinds_that_can_be_shown_are_taken(check):
    images = [encoded(mode="RGBA"), encoded(mode="P"), encoded(mode="L"), encoded(mode="I;16")]
    assert check([row(n, images=[image]) for n, image in enumerate(images)]).prompts == 4


BAD = {
    "no answer": row(answer=None),
    "there is no file": row(images=["gone.png"]),
    "truncated": row(images=[truncated()]),
    "1x1 pixels": row(images=[encoded((1, 1))]),
    "data.max_image_pixels": row(images=[encoded((300, 300))]),
    "animated": row(images=[animated()]),
    "rollout.max_prompt_tokens": row(prompt="dots " * 200),
    "literal token": row(prompt="what is <|image_pad|>?"),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_named_with_its_number_and_reason(check, reason):
    with pytest.raises(DataError) as raised:
        check([row(1), BAD[reason], row(2)], data={"max_image_pixels": 50_000})
    assert "train row 1" in raised.value.message
    assert reason in raised.value.message
    assert "on_bad_row" in raised.value.hint


def test_all_bad_rows_are_told_at_once_and_can_be_left_out(check):
    rows = [row(1), BAD["no answer"], row(2), BAD["truncated"]]
    with pytest.raises(DataError) as raised:
        check(rows)
    assert "row 1" in raised.value.message
    assert "row 3" in raised.value.message
    checked = check(rows, data={"on_bad_row": "skip"})
    assert checked.prompts == 2
    assert list(checked.bad_rows["train"]) == [1, 3]
    assert "2 unusable train rows" in checked.warnings[0]


@pytest.mark.parametrize("rows", [[], [BAD["no answer"]]])
def test_nothing_to_train_on_is_an_error(check, rows):
    with pytest.raises(DataError):
        check(rows)


def test_a_step_needs_as_many_different_prompts_as_it_takes(check):
    with pytest.raises(DataError, match="prompts_per_step = 8"):
        check([row(n) for n in range(4)], algorithm={"prompts_per_step": 8})


def test_training_rows_among_the_held_out_ones_are_a_warning(check):
    assert "also training rows" in " ".join(check([row(1), row(2)], [row(2)]).warnings)


def test_rewards_that_need_no_answer_take_rows_without(check, tmp_path):
    (tmp_path / "mine.py").write_text("def pay(reply): return 1.0\n")
    rewards = [{"kind": "python", "function": f"{tmp_path / 'mine.py'}:pay"}]
    assert check([row(answer=None)], rewards=rewards).prompts == 1


@pytest.mark.parametrize("source", ["def other(reply): return 1.0\n", "import nothing_of_that_name\n", "def pay(:\n"])
def test_a_reward_function_that_cannot_be_had_is_a_config_error(check, tmp_path, source):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError):
        check([row()], rewards=[{"kind": "python", "function": f"{tmp_path / 'mine.py'}:pay"}])


def test_a_secret_that_is_not_there_is_a_config_error(check, monkeypatch):
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_TOKEN"):
        check([row()], rewards=[{"kind": "http", "url": "http://localhost:1/score", "token": "env:NO_SUCH_TOKEN"}])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json"),
        ({"config.json": "{"}, "not JSON"),
        ({"config.json": "{}"}, "no model_type"),
        ({"config.json": '{"model_type": "qwen3_vl"}'}, "no weights"),
    ],
)
def test_a_folder_that_is_no_model(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        check_model_folder(str(tmp_path))


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "nowhere"])
def test_a_model_that_is_not_there(path):
    with pytest.raises(ModelError, match="is not a folder"):
        check_model_folder(path)


def test_a_hub_id_is_left_to_the_hub():
    check_model_folder("Qwen/Qwen3-VL-8B-Instruct")


@pytest.mark.parametrize(("longest", "limit"), [(None, 112), (40, 40), (500, 112)])
def test_the_longest_prompt_leaves_room_for_a_reply(tiny_model, longest, limit):
    config = validate(
        {
            "model": {"path": str(tiny_model), "max_tokens": 128},
            "data": {"train": "x.jsonl"},
            "rewards": [{"kind": "exact"}],
            "rollout": {"max_response_tokens": 16, "max_prompt_tokens": longest},
        }
    )
    assert prompt_limit(config) == limit
    settings = settings_for(config, None)
    assert (settings.max_prompt_tokens, settings.max_tokens, settings.adapter_version) == (limit, 128, None)


def test_every_error_says_what_to_do(check):
    with pytest.raises(ArgusError) as raised:
        check([row(answer=None)])
    assert raised.value.hint


def test_what_was_found_reaches_the_next_attempt(check):
    checked = check([row(0), row(1), row(2, images=[truncated()])], data={"on_bad_row": "skip"})
    again = decode_checked(encode_checked(checked))
    assert list(again.bad_rows["train"]) == [2]
    assert replace(again, bad_rows={}) == replace(checked, bad_rows={})


def recipe_without_model(tmp_path):
    return validate({"model": {"path": str(tmp_path / "none")}, "rewards": [{"kind": "exact"}], "data": {"train": "x"}})


def test_a_check_in_a_process_of_its_own_says_what_is_wrong(tmp_path):
    with pytest.raises(ModelError, match="is not a folder"):
        InputCheck(recipe_without_model(tmp_path)).result()


def test_a_check_that_was_stopped_has_no_result(tmp_path):
    check = InputCheck(recipe_without_model(tmp_path))
    check.stop()
    with pytest.raises(WorkerError, match="ended with code"):
        check.result()


class Unsendable(Exception):
    def __reduce__(self):
        raise TypeError("cannot be pickled")


@pytest.mark.parametrize("error", [ValueError("user code"), Unsendable("user code")])
def test_what_user_code_raises_in_a_check_is_handed_on(monkeypatch, error):
    def fail(_):
        raise error

    monkeypatch.setattr(checks, "check_input", fail)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps("config"))))
    receiver, sender = os.pipe()
    checks.answer(sender)
    with os.fdopen(receiver, "rb") as answer:
        found = pickle.load(answer)
    assert "user code" in str(found)
    assert isinstance(found, WorkerError if isinstance(error, Unsendable) else ValueError)
    if isinstance(found, ValueError):
        assert "in fail" in "".join(traceback.format_exception(found))
