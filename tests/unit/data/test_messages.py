import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argusrl.config.sections import DataSection
from argusrl.data.formats import RowParts
from argusrl.data.messages import build_prompt, text_of
from argusrl.errors import DataError
from argusrl.types import Image, Message


def build(prompt, images=None, section=None, **parts):
    return build_prompt(
        RowParts(prompt=prompt, images=images, **parts), id="train-0", section=section or DataSection(train="x")
    )


def shape(prompt) -> list:
    """Messages with images as the number of their seed."""
    return [(m.role, [p if isinstance(p, str) else p.data for p in m.content]) for m in prompt.messages]


def problem(prompt, images=None, **parts) -> str:
    with pytest.raises(DataError) as caught:
        build(prompt, images, **parts)
    return caught.value.message


def test_text_alone():
    assert shape(build("2 + 2?")) == [("user", ["2 + 2?"])]


def test_images_go_first_without_markers(png):
    a, b = png(1), png(2)
    assert shape(build("which?", [a, b])) == [("user", [a, b, "which?"])]
    assert shape(build("which?", a)) == [("user", [a, "which?"])]
    assert shape(build("which?", {"bytes": a, "path": None})) == [("user", [a, "which?"])]


def test_markers_place_images_across_messages(png):
    a, b = png(1), png(2)
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "<image>first\n"},
        {"role": "assistant", "content": "seen"},
        {"role": "user", "content": "and <image>?"},
    ]
    assert shape(build(chat, [a, b])) == [
        ("system", ["be brief"]),
        ("user", [a, "first\n"]),
        ("assistant", ["seen"]),
        ("user", ["and ", b, "?"]),
    ]


def test_parts_place_images(png):
    a, b = png(1), png(2)
    parts = [{"type": "text", "text": "left"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "right"}]
    assert shape(build([{"role": "user", "content": parts}], [a, b])) == [("user", ["left", a, b, "right"])]


def test_parts_may_carry_images_and_all_keys(png):
    import base64

    a = png(1)
    uri = "data:image/png;base64," + base64.b64encode(a).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": uri}, "text": None},
        {"type": "text", "text": "<image>what?", "image_url": None},
    ]
    assert shape(build([{"role": "user", "content": parts}])) == [("user", [a, "what?"])]


def test_without_images_in_text_rows_go_to_the_first_user_message(png):
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert shape(build(chat, [png(1)])) == [("system", ["s"]), ("user", [png(1), "q"])]


def test_counts_must_match(png):
    assert "2 <image> markers, but 1 images" in problem("<image><image>?", [png(1)])
    assert "1 <image> markers, but 0 images" in problem("<image>?")
    assert "1 <image> markers, but 2 images" in problem("<image>?", [png(1), png(2)])


def test_what_is_no_prompt():
    assert "missing" in problem(None)
    assert "empty text" in problem("  \n")
    assert "neither text nor a list" in problem([])
    assert "neither text nor a list" in problem(7)
    assert "no role and content" in problem([{"content": "x"}])
    assert "role 'tool'" in problem([{"role": "tool", "content": "x"}])
    assert "ends with a message of the assistant" in problem(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    )
    assert "type 'video'" in problem([{"role": "user", "content": [{"type": "video"}]}])
    assert "neither text nor a list of parts" in problem([{"role": "user", "content": None}])
    assert "is no text" in problem([{"role": "user", "content": [{"type": "text", "text": None}]}])


def test_an_image_with_empty_text_is_empty(png):
    assert "empty text" in problem("", [png(1)])


def test_a_bad_image_says_which(png):
    assert problem("which?", [png(1), png(2)[:50]]).startswith("image 2: truncated")
    assert problem("which?", [None]).startswith("image 1: missing")


def test_system_prompt_and_suffix(png):
    section = DataSection(train="x", system_prompt="You see.", suffix="Answer briefly.")
    assert shape(build("which?", png(1), section)) == [
        ("system", ["You see."]),
        ("user", [png(1), "which? Answer briefly."]),
    ]
    line = DataSection(train="x", suffix="\nAnswer briefly.")
    assert shape(build("<image> which?", png(1), line))[0][1][-1] == " which?\nAnswer briefly."
    assert shape(build("which? <image>", png(1), section))[1][1] == ["which? ", png(1), "Answer briefly."]


def test_system_prompt_goes_before_the_rows_own():
    section = DataSection(train="x", system_prompt="Mine.")
    chat = [{"role": "system", "content": "Theirs."}, {"role": "user", "content": "q"}]
    assert shape(build(chat, section=section))[0] == ("system", ["Mine.\n\n", "Theirs."])


pieces = st.recursive(
    st.sampled_from([None, 1, "", "x", "<image>", "user", "text", "image", b"x", float("nan")]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries({"role": inner, "content": inner})
        | st.fixed_dictionaries({"type": inner, "text": inner})
        | st.fixed_dictionaries({"bytes": inner, "path": inner})
    ),
    max_leaves=8,
)


@given(prompt=pieces, images=pieces, answer=pieces)
def test_whatever_a_row_holds_it_is_a_prompt_or_a_bad_row(prompt, images, answer):
    with contextlib.suppress(DataError):
        build(prompt, images, answer=answer)


def test_answers_are_json_like():
    assert build("q", answer=["a", {"b": 1}]).answer == ["a", {"b": 1}]
    assert build("q", answer=float("nan")).answer is None
    assert "answer holds bytes" in problem("q", answer=b"x")


def test_text_of():
    image = Image(data=b"", width=2, height=2)
    assert text_of([Message(role="user", content=("a", image, "b")), Message(role="user", content=("c",))]) == "a\nb\nc"
