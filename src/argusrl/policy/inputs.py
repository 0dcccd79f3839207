"""Rows -> the tensors of one packed forward, with every check that a silent mismatch would otherwise survive."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from argusrl.errors import ModelError
from argusrl.policy.attention import PackedLayout, Segment, make_layout
from argusrl.policy.model import has_mrope, takes_images
from argusrl.policy.rows import Row, RowTurn
from argusrl.policy.settings import PolicySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Sequences side by side in one row of T tokens, N of them predicted, M different images.

    Sequences of the same first prompt share its tokens, and its images.

    `position_ids` is (4, 1, T) for M-RoPE: text positions, then time, height and width; (1, T) for other models.
    """

    input_ids: Tensor  # [1, T]
    layout: PackedLayout  # where sequences begin and end
    position_ids: Tensor
    token_types: Tensor  # [1, T] 0 text, 1 image
    sources: Tensor  # [N] positions that predict
    targets: Tensor  # [N] predicted ids
    engine: Tensor  # [N] float32, the engine's log-probabilities
    advantages: Tensor  # [N] float32
    image_inputs: dict[str, Tensor] = field(default_factory=dict)  # of the M different images, e.g. pixel_values
    image_order: tuple[int, ...] = ()  # for each image in reading order, which of the M it is

    def to(self, device: str | torch.device) -> PackedBatch:
        moved = {
            item.name: getattr(self, item.name).to(device)
            for item in fields(self)
            if item.name not in ("image_inputs", "image_order")
        }
        return replace(self, **moved, image_inputs={k: v.to(device) for k, v in self.image_inputs.items()})


@dataclass(slots=True)
class _PackedRow:
    """A row that is being put together."""

    ids: list[int] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)

    def add(
        self,
        ids: Sequence[int],
        types: Sequence[int],
        positions: Tensor,
        images: Sequence[int],
        prefix: Segment | None = None,
    ) -> Segment:
        before = (prefix.start, prefix.length) if prefix else (0, 0)
        segment = Segment(len(self.ids), len(ids), *before)
        self.segments.append(segment)
        self.ids += ids
        self.types += types
        self.positions.append(positions)
        self.images += images
        return segment


class InputBuilder:
    """Packs rows for one model. `model` is used for its config and its position rule only."""

    def __init__(self, model: Any, settings: PolicySettings) -> None:
        self._config = model.config
        self._rope_index = model.model.get_rope_index if has_mrope(model.config) else None
        self._processor = _image_processor(settings) if takes_images(model.config) else None
        self._image_token = getattr(model.config, "image_token_id", getattr(model.config, "image_token_index", None))
        placeholder = () if self._image_token is None else (self._image_token,)
        self._banned = frozenset((*settings.banned_ids, *placeholder))

    def pack(self, rows: Sequence[Row]) -> PackedBatch:
        """One micro-batch. No rows give a row of one token that predicts nothing, so that all ranks run a forward.

        Raises ModelError where image tokens and pixels disagree, where ids and log-probabilities differ in number,
        or where a response holds a token that the engine must never sample.
        """
        numbers, unique = _number_images(rows, once=self._rope_index is not None)
        inputs = self._process(unique)
        row = _PackedRow()
        for alike in self._by_prompt(rows, numbers):
            self._add(row, alike, inputs.get("image_grid_thw"))
        if not rows:
            row.add([0], [0], self._positions([0], [0], None), [])
        return PackedBatch(
            input_ids=torch.tensor([row.ids]),
            layout=make_layout(row.segments),
            position_ids=torch.cat(row.positions, dim=-1),
            token_types=torch.tensor([row.types]),
            sources=torch.tensor(row.sources, dtype=torch.long),
            targets=torch.tensor(row.targets, dtype=torch.long),
            engine=torch.tensor(row.engine, dtype=torch.float32),
            advantages=torch.tensor(row.advantages, dtype=torch.float32),
            image_inputs=inputs,
            image_order=tuple(row.images),
        )

    def _by_prompt(self, rows: Sequence[Row], numbers: Sequence[list[int]]) -> list[list[tuple[Row, list[int]]]]:
        """Rows with equal first prompts (ids and pixels) together, in order of first appearance."""
        groups: dict[Any, list[tuple[Row, list[int]]]] = {}
        for row, images in zip(rows, numbers, strict=True):
            self._check(row)
            seen = len(_span_lengths(self._prompt_types(row.turns[0])))
            groups.setdefault((row.turns[0].prompt_ids, tuple(images[:seen])), []).append((row, images))
        return list(groups.values())

    def _add(self, packed: _PackedRow, alike: Sequence[tuple[Row, list[int]]], grids: Tensor | None) -> None:
        """Add rows of the same first prompt: the prompt once (if there are several), then what follows in each."""
        shared: Segment | None = None
        for row, images in alike:
            ids, types = row.ids, self._token_types(row)
            grid = grids[images] if grids is not None and images else None
            self._check_images(types, len(images), grid)
            positions = self._positions(ids, types, grid)
            cut = len(row.turns[0].prompt_ids) if len(alike) > 1 else 0
            seen = len(_span_lengths(types[:cut]))  # images of the prompt
            if cut and shared is None:
                shared = packed.add(ids[:cut], types[:cut], positions[..., :cut], images[:seen])
            if cut == len(ids):
                continue  # nothing was sampled
            rest = packed.add(ids[cut:], types[cut:], positions[..., cut:], images[seen:], shared)
            for offset, token, logprob in _predicted(row):
                before = offset - 1  # the token that predicts it, the shared prompt's last one perhaps
                inside = before - cut + rest.start
                packed.sources.append(before + shared.start if shared and before < cut else inside)
                packed.targets.append(token)
                packed.engine.append(logprob)
                packed.advantages.append(row.advantage)

    def image_tokens(self, image: bytes) -> int:
        """How many placeholder tokens an image has after expansion."""
        return self._merged(self._process([image])["image_grid_thw"])[0]

    def _merged(self, grid: Tensor) -> list[int]:
        merge = self._config.vision_config.spatial_merge_size
        return [int(tokens) for tokens in grid.prod(-1) // merge**2]

    def _process(self, images: Sequence[bytes]) -> dict[str, Tensor]:
        if not images:
            return {}
        if self._processor is None:
            raise ModelError("a row has images, but the model reads text only")
        try:
            return dict(self._processor(images=[_decode(data) for data in images], return_tensors="pt"))
        except (OSError, ValueError) as error:
            raise ModelError(f"an image cannot be processed: {error}") from error

    def _token_types(self, row: Row) -> list[int]:
        """1 at image placeholders. By span: a response is text whatever its ids are."""
        types: list[int] = []
        for turn in row.turns:
            types += self._prompt_types(turn)
            types += [0] * len(turn.response_ids)
        return types

    def _prompt_types(self, turn: RowTurn) -> list[int]:
        return [int(token == self._image_token) for token in turn.prompt_ids]

    def _positions(self, ids: Sequence[int], types: Sequence[int], grid: Tensor | None) -> Tensor:
        text = torch.arange(len(ids))
        if self._rope_index is None:
            return text[None]
        places, _ = self._rope_index(torch.tensor([ids]), torch.tensor([types]), image_grid_thw=grid)
        return torch.cat([text[None, None], places], dim=0)

    def _check(self, row: Row) -> None:
        for number, turn in enumerate(row.turns):
            if len(turn.response_ids) != len(turn.logprobs):
                counts = f"{len(turn.response_ids)} response ids and {len(turn.logprobs)} log-probabilities"
                raise ModelError(f"turn {number} has {counts}")
            banned = sorted(self._banned.intersection(turn.response_ids))
            if banned:
                raise ModelError(f"turn {number} holds banned token ids {banned}: the engine must never sample them")
        if not row.turns or not row.turns[0].prompt_ids:
            raise ModelError("a row begins without a prompt")

    def _check_images(self, types: Sequence[int], images: int, grid: Tensor | None) -> None:
        spans = _span_lengths(types)
        if spans and not images:
            raise ModelError(f"a row has {sum(spans)} image tokens but no pixels")
        if grid is None:  # models without grids check their own count in the forward
            return
        expected = self._merged(grid)
        if spans != expected:
            raise ModelError(
                f"image tokens {spans} do not match the {expected} that the images have",
                "engine and trainer must use the same model.min_pixels and model.max_pixels",
            )


def _number_images(rows: Sequence[Row], *, once: bool) -> tuple[list[list[int]], list[bytes]]:
    """For each row which of the different images its images are, and these; all are different where not `once`."""
    known: dict[str, int] = {}
    unique: list[bytes] = []
    numbers: list[list[int]] = []
    for row in rows:
        numbers.append([])
        for data in row.images:
            number = known.setdefault(hashlib.sha256(data).hexdigest(), len(unique)) if once else len(unique)
            if number == len(unique):
                unique.append(data)
            numbers[-1].append(number)
    return numbers, unique


def _predicted(row: Row) -> Iterator[tuple[int, int, float]]:
    """(position in the row, id, engine log-probability) of every response token."""
    position = 0
    for turn in row.turns:
        position += len(turn.prompt_ids)
        for token, logprob in zip(turn.response_ids, turn.logprobs, strict=True):
            yield position, token, logprob
            position += 1


def _span_lengths(types: Sequence[int]) -> list[int]:
    """Lengths of the runs of ones."""
    runs = "".join(map(str, types)).split("0")
    return [len(run) for run in runs if run]


def _decode(data: bytes) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def _image_processor(settings: PolicySettings) -> Any:
    """The engine's own: the same class from the same files with the same limits."""
    from transformers import AutoProcessor

    limits = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
    given = {name: value for name, value in limits.items() if value is not None}
    try:
        processor = AutoProcessor.from_pretrained(settings.model, revision=settings.revision, **given)
    except (OSError, ValueError) as error:
        raise ModelError(f"{settings.model} has no image processor: {error}") from error
    return processor.image_processor
