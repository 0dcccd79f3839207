"""The checkpoints in models/: what ships is what the recipes, the renderer and docs/tiny_model.md rely on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from argusrl.data import shapes
from argusrl.rollout.rendering import Renderer
from argusrl.types import Message

MODELS = Path(__file__).resolve().parents[3] / "models"
FOLDERS = sorted(folder for folder in MODELS.iterdir() if folder.is_dir())
SINGLE_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<think>", "</think>", "<answer>", "</answer>", "<action>", "</action>"),
)
IMAGE = "<|vision_start|>" + 9 * "<|image_pad|>" + "<|vision_end|>"  # 96 x 96 pixels


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def renderer(request: pytest.FixtureRequest) -> Renderer:
    return Renderer(str(request.param))


def test_all_checkpoints_together_are_small():
    assert len(FOLDERS) == 3
    assert sum(file.stat().st_size for file in MODELS.rglob("*")) < 6_000_000


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_class_is_the_real_one_and_deepstack_runs(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert max(config["vision_config"]["deepstack_visual_indexes"]) < config["vision_config"]["depth"]


def test_special_tokens_and_tags_are_one_id_each_and_any_text_comes_back(renderer):
    ids = [renderer.tokenizer(text, add_special_tokens=False)["input_ids"] for text in SINGLE_TOKENS]
    assert all(len(one) == 1 for one in ids)
    assert len({one[0] for one in ids}) == len(SINGLE_TOKENS)
    text = "Übung 12: ∠ABC = 30°, 何? \n\t<answer>B</answer>"
    assert renderer.decode(renderer.tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_a_conversation_is_rendered_as_the_warm_start_saw_it(renderer):
    image, question = shapes.prompt(0, "heldout").messages[0].content
    first = renderer.first([Message(role="user", content=(image, question))])
    then = renderer.following([Message(role="user", content=(image,))], ended=True)
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.tokenizer.decode(first.expanded_ids) == turn.format(IMAGE + question)
    assert renderer.tokenizer.decode(then.expanded_ids) == "\n" + turn.format(IMAGE)


def test_vision_tokens_are_banned_and_replies_end_with_im_end(renderer):
    banned = set(renderer.tokenizer.convert_ids_to_tokens(list(renderer.banned_ids)))
    assert {"<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|endoftext|>"} <= banned
    assert renderer.tokenizer.convert_ids_to_tokens(list(renderer.end_ids)) == ["<|im_end|>"]
