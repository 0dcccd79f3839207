"""A visual task made on the fly: coloured shapes on a 3 × 3 grid, with a question about the red ones.

    "how many red shapes are there?"  ->  "0" … "6"
    "where is the red shape?"         ->  "row 1 column 1" … "row 3 column 3"

Example `index` of a split is a pure function of (split, index): any process can make any example, in any order, and
no two splits share one. Guessing scores about 0.13.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image as PillowImage
from PIL import ImageDraw

from argusrl.errors import DataError
from argusrl.types import Image, Message, Prompt

CELLS = 3  # a side
CELL_PIXELS = 32
IMAGE_PIXELS = CELLS * CELL_PIXELS
COUNT = "how many red shapes are there?"
LOCATE = "where is the red shape?"
ANSWERS = {
    COUNT: tuple(str(count) for count in range(7)),
    LOCATE: tuple(f"row {row} column {column}" for row in range(1, CELLS + 1) for column in range(1, CELLS + 1)),
}
SPLITS = ("train", "heldout", "warmstart")  # warmstart: what scripts/make_tiny_model.py learnt from

_RED = (220, 40, 40)
_OTHERS = ((40, 170, 60), (50, 80, 220), (235, 210, 50))
_DISTRACTOR_SHARE = 0.6  # of the cells without a red shape
_KINDS = ("circle", "square", "triangle")


def prompt(index: int, split: str, *, images: str = "real") -> Prompt:
    """Example `index` of `split` as a Prompt: one 96 × 96 PNG, a question, and its answer.

    `images` is "real", or "noise" for the control experiment: the same questions and answers, next to random pixels
    that tell nothing. Raises DataError for a split or a kind of images that does not exist.
    """
    if split not in SPLITS or images not in ("real", "noise") or index < 0:
        raise DataError(
            f"shapes cannot make example {index!r} of split {split!r} with images {images!r}",
            f"index is at least 0, split one of {', '.join(SPLITS)}, images real or noise",
        )
    rng = np.random.default_rng((SPLITS.index(split), index))
    question, answer, red_cells = _question(rng)
    picture = _draw(rng, red_cells)
    if images == "noise":
        picture = PillowImage.fromarray(rng.integers(0, 256, (IMAGE_PIXELS, IMAGE_PIXELS, 3), dtype=np.uint8))
    return Prompt(
        id=f"shapes-{split}-{index:06d}",
        messages=(Message(role="user", content=(_encode(picture), question)),),
        answer=answer,
    )


def _question(rng: np.random.Generator) -> tuple[str, str, list[int]]:
    """A question, its answer, and the cells (row * CELLS + column) that hold a red shape."""
    question = COUNT if rng.random() < 0.5 else LOCATE
    answer = ANSWERS[question][int(rng.integers(len(ANSWERS[question])))]
    if question == LOCATE:
        return question, answer, [ANSWERS[LOCATE].index(answer)]
    return question, answer, rng.permutation(CELLS * CELLS)[: int(answer)].tolist()


def _draw(rng: np.random.Generator, red_cells: list[int]) -> PillowImage.Image:
    grey = int(rng.integers(118, 139))  # near the middle: about zero after the usual normalisation
    picture = PillowImage.new("RGB", (IMAGE_PIXELS, IMAGE_PIXELS), (grey, grey, grey))
    canvas = ImageDraw.Draw(picture)
    for cell in range(CELLS * CELLS):
        colour = _RED if cell in red_cells else _OTHERS[int(rng.integers(len(_OTHERS)))]
        if cell in red_cells or rng.random() < _DISTRACTOR_SHARE:
            _draw_shape(rng, canvas, cell, colour)
    return picture


def _draw_shape(rng: np.random.Generator, canvas: ImageDraw.ImageDraw, cell: int, colour: tuple[int, int, int]) -> None:
    """One shape of random kind, size and shade, at a random place inside its cell."""
    radius = int(rng.integers(8, 13))
    margin = CELL_PIXELS // 2 - radius - 1
    shift = rng.integers(-margin, margin + 1, 2)
    x = cell % CELLS * CELL_PIXELS + CELL_PIXELS // 2 + int(shift[0])
    y = cell // CELLS * CELL_PIXELS + CELL_PIXELS // 2 + int(shift[1])
    shade: Any = tuple(np.clip(np.asarray(colour) + rng.integers(-15, 16, 3), 0, 255).tolist())
    kind = _KINDS[int(rng.integers(len(_KINDS)))]
    if kind == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=shade)
    elif kind == "square":
        canvas.rectangle((x - radius, y - radius, x + radius, y + radius), fill=shade)
    else:
        canvas.polygon(((x, y - radius), (x - radius, y + radius), (x + radius, y + radius)), fill=shade)


def _encode(picture: PillowImage.Image) -> Image:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return Image(data=buffer.getvalue(), width=picture.width, height=picture.height)
