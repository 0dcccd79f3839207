"""Rendering with the tiny model's own processor: tokens only, no weights."""

from __future__ import annotations

import json

import pytest
from PIL import Image as Pillow

from argusrl.data.images import encode
from argusrl.errors import ModelError
from argusrl.rollout.rendering import Renderer, RenderingRefused
from argusrl.types import Message

QUESTION = "How many dots are there?"
SAD_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def renderer(tiny_model) -> Renderer:
    return Renderer(str(tiny_model))


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory, tiny_model):
    """A folder with a tokenizer and nothing else."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("text")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("processor_class", None)  # of the model with images
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


def picture(width: int = 64, height: int = 64):
    return encode(Pillow.new("RGB", (width, height), (200, 30, 30)))


def asked(*parts, role: str = "user") -> Message:
    return Message(role=role, content=parts)


def whole(renderer: Renderer, *messages: Message) -> tuple[int, ...]:
    """The template's own rendering of a finished conversation, tokenised as one text."""
    return renderer._tokenize(renderer._template(messages), messages).expanded_ids


@pytest.mark.parametrize("images", [0, 1, 2])
def test_turns_one_after_the_other_are_the_templates_own_conversation(renderer, images):
    first = [asked("Be brief.", role="system"), asked(*[picture()] * images, QUESTION)]
    answer = asked("a red dot", role="assistant")
    later = [asked(picture(96, 64), "And now?")]
    reply = renderer.tokenizer("a red dot<|im_end|>", add_special_tokens=False)["input_ids"]
    start, rest = renderer.first(first), renderer.following(later, ended=True)
    assert (*start.expanded_ids, *reply, *rest.expanded_ids) == whole(renderer, *first, answer, *later)
    assert (len(start.images), len(rest.images)) == (images, 1)


def test_a_reply_that_was_cut_is_closed_before_the_next_message(renderer):
    later = [asked("And now?")]
    cut, ended = (renderer.following(later, ended=value).expanded_ids for value in (False, True))
    assert cut == (renderer.tokenizer.eos_token_id, *ended)


def test_whatever_end_token_the_template_uses_is_not_said_twice(tiny_model, tmp_path):
    """Models whose turns do not end with the tokenizer's eos: generation_config.json knows the other one."""
    template = (tiny_model / "chat_template.jinja").read_text().replace("<|im_end|>", "<|endoftext|>")
    (tmp_path / "other.jinja").write_text(template)
    other = Renderer(str(tiny_model), chat_template=tmp_path / "other.jinja")
    other.end_texts = ("<|im_end|>", "<|endoftext|>")
    end = other.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert other.following([asked("?")], ended=False).expanded_ids[0] == end
    assert other.following([asked("?")], ended=True).expanded_ids[0] != end


@pytest.mark.parametrize(("width", "height"), [(64, 64), (100, 40), (33, 190), (400, 300)])
def test_lengths_are_known_without_decoding(renderer, width, height):
    messages = [asked(picture(width, height), "left", picture(), QUESTION)]
    rendered = renderer.first(messages)
    assert renderer.count_tokens(messages) == len(rendered.expanded_ids)
    assert rendered.collapsed_ids.count(renderer.image_token_id) == 2
    merge = renderer.processor.image_processor.merge_size**2
    assert rendered.image_patches == merge * rendered.expanded_ids.count(renderer.image_token_id)


def test_expanding_every_placeholder_turns_collapsed_into_expanded_ids(renderer):
    rendered = renderer.first([asked(picture(), "a", picture(128, 64), "b")])
    counts = iter(renderer._image_tokens(image) for image in rendered.images)
    pad = renderer.image_token_id
    expanded = [one for token in rendered.collapsed_ids for one in [token] * (next(counts) if token == pad else 1)]
    assert tuple(expanded) == rendered.expanded_ids


def test_placeholders_in_a_text_are_refused_wherever_it_stands(renderer):
    assert {"<|image_pad|>", "<|video_pad|>", "<|vision_start|>"} <= set(renderer.placeholder_texts)
    for text in renderer.placeholder_texts:
        messages = [asked(picture(), f"what is {text}?")]
        for render in (renderer.first, renderer.count_tokens, lambda m: renderer.following(m, ended=True)):
            with pytest.raises(RenderingRefused, match="placeholder"):
                render(messages)


def test_a_template_that_drops_an_image_is_refused(tiny_model, tmp_path):
    (tmp_path / "blind.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{% if m.content is string %}"
        "{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    )
    blind = Renderer(str(tiny_model), chat_template=tmp_path / "blind.jinja")
    with pytest.raises(RenderingRefused, match="0 placeholders of 1 images"):
        blind.first([asked(picture(), QUESTION)])


def test_an_image_the_processor_does_not_take_costs_one_row_only(renderer):
    messages = [asked(picture(1000, 4), QUESTION)]
    for render in (renderer.first, renderer.count_tokens):
        with pytest.raises(RenderingRefused, match="aspect ratio"):
            render(messages)


def test_vision_tokens_are_banned_and_ends_are_not(renderer):
    banned = set(renderer.banned_ids)
    vision = {
        token for text, token in renderer.tokenizer.get_added_vocab().items() if "vision" in text or "_pad" in text
    }
    assert vision
    assert vision <= banned
    assert renderer.tokenizer.eos_token_id in renderer.end_ids
    assert not banned & set(renderer.end_ids)


def test_special_tokens_of_a_reply_are_not_shown_to_anyone(renderer):
    ids = renderer.tokenizer("four<|im_end|>", add_special_tokens=False)["input_ids"]
    assert renderer.decode(ids) == "four"


def test_a_text_only_model(text_folder):
    renderer = Renderer(str(text_folder))
    rendered = renderer.first([asked(QUESTION)])
    assert not renderer.shows_images
    assert rendered.collapsed_ids == rendered.expanded_ids
    assert (rendered.images, rendered.image_patches, renderer.placeholder_texts) == ((), 0, ())
    assert renderer.count_tokens([asked(QUESTION)]) == len(rendered.expanded_ids)
    with pytest.raises(RenderingRefused, match="text only"):
        renderer.first([asked(picture(), QUESTION)])


def test_messages_that_the_template_refuses_cost_one_row_only(tiny_model, tmp_path):
    (tmp_path / "sad.jinja").write_text(SAD_TEMPLATE + (tiny_model / "chat_template.jinja").read_text())
    renderer = Renderer(str(tiny_model), chat_template=tmp_path / "sad.jinja")
    assert renderer.first([asked("hi")]).expanded_ids
    with pytest.raises(RenderingRefused, match="no system"):
        renderer.first([asked("be brief", role="system"), asked("hi")])


@pytest.mark.parametrize("template", ["{% for m in %}", "{{ messages[0].content }}"])
def test_a_template_that_cannot_be_used_is_one_clear_error(tiny_model, tmp_path, template):
    (tmp_path / "broken.jinja").write_text(template)
    with pytest.raises(ModelError, match="template"):
        Renderer(str(tiny_model), chat_template=tmp_path / "broken.jinja")


def test_template_options_reach_the_template(tiny_model, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ mood }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    renderer = Renderer(str(tiny_model), chat_template=tmp_path / "own.jinja", template_options={"mood": "calm "})
    assert renderer.decode(renderer.first([asked("hi")]).expanded_ids) == "calm hi"


def test_a_folder_without_a_tokenizer_is_a_model_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    with pytest.raises(ModelError, match="processor or tokenizer"):
        Renderer(str(tmp_path))


def test_pixels_are_processed_once_per_size_of_image(tiny_model, monkeypatch):
    """How many tokens an image takes depends on its size alone: a later one of the same size is only counted."""
    fresh = Renderer(str(tiny_model))
    messages = [asked(picture(64, 96), "and", picture(128, 64), QUESTION), asked(picture(64, 96))]
    processed = fresh.first(messages)
    monkeypatch.setattr(fresh, "_process", None)
    assert fresh.first(messages) == processed
    assert fresh.first(messages[1:]).image_patches == 6 * 4


def test_a_processor_that_looks_at_more_than_the_size_is_asked_every_time(tiny_model, monkeypatch):
    fresh = Renderer(str(tiny_model))
    monkeypatch.setattr(fresh, "_expanded", lambda *_: None)  # nothing can be put together from what was learnt
    assert [len(fresh.first([asked(picture(), QUESTION)]).expanded_ids) for _ in range(2)] == [
        len(Renderer(str(tiny_model)).first([asked(picture(), QUESTION)]).expanded_ids)
    ] * 2
