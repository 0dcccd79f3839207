"""The generated quickstart task: pure in (split, index), disjoint splits, answers that the picture shows."""

from __future__ import annotations

import io
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from PIL import Image as PillowImage

from argusrl.data import shapes
from argusrl.errors import DataError
from argusrl.types import Image, Prompt


def image_of(prompt: Prompt) -> Image:
    (image,) = prompt.messages[0].images
    return image


def pixels_of(prompt: Prompt) -> np.ndarray:
    """[96, 96, 3] integers."""
    return np.asarray(PillowImage.open(io.BytesIO(image_of(prompt).data))).astype(int)


def question_of(prompt: Prompt) -> str:
    text = prompt.messages[0].content[1]
    assert isinstance(text, str)
    return text


def red_cells(pixels: np.ndarray) -> list[int]:
    """Cells with red pixels, looked up in the picture alone."""
    red = (pixels[..., 0] > 180) & (pixels[..., 1] < 80) & (pixels[..., 2] < 80)
    cells = red.reshape(3, 32, 3, 32).any(axis=(1, 3))
    return np.flatnonzero(cells).tolist()


def test_an_example_is_one_picture_then_one_question():
    prompt = shapes.prompt(0, "train")
    (message,) = prompt.messages
    assert message.role == "user"
    assert isinstance(message.content[0], Image)
    assert question_of(prompt) in shapes.ANSWERS
    picture = PillowImage.open(io.BytesIO(image_of(prompt).data))
    assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (96, 96))
    assert (image_of(prompt).width, image_of(prompt).height) == (96, 96)


@pytest.mark.parametrize("split", shapes.SPLITS)
def test_the_answer_is_what_the_picture_shows(split):
    for index in range(150):
        prompt = shapes.prompt(index, split)
        cells = red_cells(pixels_of(prompt))
        if question_of(prompt) == shapes.COUNT:
            assert prompt.answer == str(len(cells))
        else:
            (cell,) = cells
            assert prompt.answer == f"row {cell // 3 + 1} column {cell % 3 + 1}"


def test_every_answer_is_about_equally_frequent():
    prompts = [shapes.prompt(index, "train") for index in range(1200)]
    for question, answers in shapes.ANSWERS.items():
        counts = Counter(prompt.answer for prompt in prompts if question_of(prompt) == question)
        assert set(counts) == set(answers)
        assert max(counts.values()) < 2 * min(counts.values())


def test_no_picture_is_in_two_splits_or_twice_in_one():
    digests = [image_of(shapes.prompt(index, split)).sha256 for split in shapes.SPLITS for index in range(400)]
    assert len(set(digests)) == len(digests)
    ids = [shapes.prompt(index, split).id for split in shapes.SPLITS for index in range(400)]
    assert len(set(ids)) == len(ids)


def test_noise_keeps_question_and_answer_and_hides_the_picture():
    for index in range(20):
        real, noise = shapes.prompt(index, "heldout"), shapes.prompt(index, "heldout", images="noise")
        assert (noise.id, noise.answer, question_of(noise)) == (real.id, real.answer, question_of(real))
        assert abs(np.corrcoef(pixels_of(real).ravel(), pixels_of(noise).ravel())[0, 1]) < 0.05


def test_another_process_makes_the_same_examples_in_any_order():
    script = (
        "from argusrl.data import shapes\n"
        "print([shapes.prompt(i, s).messages[0].images[0].sha256 for i in (7, 3) for s in shapes.SPLITS])"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    here = [image_of(shapes.prompt(index, split)).sha256 for index in (7, 3) for split in shapes.SPLITS]
    assert output.strip() == str(here)


@pytest.mark.parametrize(
    ("index", "split", "options"), [(0, "test", {}), (-1, "train", {}), (0, "train", {"images": "blurred"})]
)
def test_what_does_not_exist_is_refused_with_the_choices(index, split, options):
    with pytest.raises(DataError, match=r"train, heldout, warmstart"):
        shapes.prompt(index, split, **options)
