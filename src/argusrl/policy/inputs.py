"""Rows -> the tensors of one packed forward, with every check that a silent mismatch would otherwise survive."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from argusrl.errors import ModelError
from argusrl.policy.attention import PackedLayout, Segment, Strategy, make_layout
from argusrl.policy.model import has_mrope, takes_images
from argusrl.policy.prefix_tree import grow
from argusrl.policy.rows import Row
from argusrl.policy.settings import PolicySettings
from argusrl.policy.step_work import StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Sequences side by side in one row of T tokens, N of them predicted, M different images.

    What sequences have in common from their first token on, images included, is there once.

    `position_ids` is (4, 1, T) for M-RoPE: text positions, then time, height and width; (1, T) for other models.
    """

    input_ids: Tensor  # [1, T]
    layout: PackedLayout  # who sees whom
    position_ids: Tensor
    token_types: Tensor  # [1, T] 0 text, 1 image
    sources: Tensor  # [N] positions that predict
    targets: Tensor  # [N] predicted ids
    engine: Tensor  # [N] float32, the engine's log-probabilities
    advantages: Tensor  # [N] float32
    images: tuple[bytes, ...] = ()  # the M different ones, encoded
    image_order: tuple[int, ...] = ()  # for each image in reading order, which of the M it is
    fresh: tuple[int, ...] = ()  # which of the M have no features yet
    image_inputs: dict[str, Tensor] = field(default_factory=dict)  # of the fresh ones, e.g. pixel_values
    runs_tower: bool = False  # the forward has to run the vision tower, with a blank image where none is fresh

    def to(self, device: str | torch.device) -> PackedBatch:
        moved = {
            item.name: getattr(self, item.name).to(device)
            for item in fields(self)
            if item.name == "layout" or isinstance(getattr(self, item.name), Tensor)
        }
        return replace(self, **moved, image_inputs={k: v.to(device) for k, v in self.image_inputs.items()})


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A row as the model reads it."""

    row: Row
    ids: list[int]
    types: bytes  # 1 at image tokens
    positions: Tensor  # [1 or 4, (1,) L]
    images: list[int]  # which of the batch's different images, in reading order
    starts: list[int]  # where they begin
    key: tuple[int, ...]  # ids; an image's tokens are one negative number that stands for the image


class InputBuilder:
    """Packs rows for one model. `model` is used for its config and its position rule only."""

    def __init__(self, model: Any, settings: PolicySettings, attention: Strategy = "gathered") -> None:
        self._config = model.config
        self._rope_index = model.model.get_rope_index if has_mrope(model.config) else None
        self._processor = _image_processor(settings) if takes_images(model.config) else None
        self._image_token = getattr(model.config, "image_token_id", getattr(model.config, "image_token_index", None))
        placeholder = () if self._image_token is None else (self._image_token,)
        self._banned = frozenset((*settings.banned_ids, *placeholder))
        self._attention: Strategy = attention

    def pack(self, rows: Sequence[Row], work: StepWork | None = None) -> PackedBatch:
        """One micro-batch. No rows give a row of one token that predicts nothing, so that all ranks run a forward.

        `work` has the features of images that need not be read again, and hears of the rows.

        Raises ModelError where image tokens and pixels disagree, where ids and log-probabilities differ in number,
        or where a response holds a token that the engine must never sample.
        """
        work = work or StepWork()
        numbers, unique = _number_images(rows, once=self._rope_index is not None)
        fresh = [number for number, image in enumerate(unique) if image not in work.features]
        inputs = self._process([unique[number] for number in fresh])
        grids = self._grids(unique, fresh, inputs.get("image_grid_thw"), work)
        known: dict[Any, Any] = {}
        sequences = [
            self._sequence(row, images, unique, grids, known, work) for row, images in zip(rows, numbers, strict=True)
        ]
        return PackedBatch(
            **(self._packed(sequences) if sequences else self._nothing()),
            images=tuple(unique),
            fresh=tuple(fresh),
            image_inputs=inputs,
            runs_tower=bool(fresh),
        )

    def _nothing(self) -> dict[str, Any]:
        zero, none = torch.zeros(1, 1, dtype=torch.long), torch.zeros(0)
        return {
            "input_ids": zero,
            "layout": make_layout([Segment(0, 1)], self._attention),
            "position_ids": self._positions(b"\0", None, {}),
            "token_types": zero,
            "sources": none.long(),
            "targets": none.long(),
            "engine": none,
            "advantages": none,
        }

    def _packed(self, sequences: Sequence[_Sequence]) -> dict[str, Any]:
        """The tree of what they have in common, node by node, and for each sequence where its replies are in it."""
        tree = grow([sequence.key for sequence in sequences])
        ids: list[int] = []
        types: list[int] = []
        positions: list[Tensor] = []
        images: list[int] = []
        segments: list[Segment] = []
        for node in tree.nodes:
            owner, part = sequences[node.owner], slice(node.start, node.end)
            segments.append(Segment(len(ids), node.end - node.start, node.parent))
            ids += owner.ids[part]
            types += owner.types[part]
            positions.append(owner.positions[..., part])
            images += [
                image for image, start in zip(owner.images, owner.starts, strict=True) if node.start <= start < node.end
            ]
        sources: list[Tensor] = []
        targets: list[int] = []
        engine: list[float] = []
        advantages: list[float] = []
        for number, sequence in enumerate(sequences):
            on_path = [segments[node] for node in tree.path(number)]
            places = torch.cat([torch.arange(one.start, one.start + one.length) for one in on_path])
            predicted = list(_predicted(sequence.row))
            sources.append(places[torch.tensor([offset - 1 for offset, _, _ in predicted], dtype=torch.long)])
            targets += [token for _, token, _ in predicted]
            engine += [logprob for _, _, logprob in predicted]
            advantages += [sequence.row.advantage] * len(predicted)
        return {
            "input_ids": torch.tensor([ids]),
            "layout": make_layout(segments, self._attention),
            "position_ids": torch.cat(positions, dim=-1),
            "token_types": torch.tensor([types]),
            "sources": torch.cat(sources),
            "targets": torch.tensor(targets, dtype=torch.long),
            "engine": torch.tensor(engine, dtype=torch.float32),
            "advantages": torch.tensor(advantages, dtype=torch.float32),
            "image_order": tuple(images),
        }

    def _sequence(
        self,
        row: Row,
        images: list[int],
        unique: Sequence[bytes],
        grids: Tensor | None,
        known: dict[Any, Any],
        work: StepWork,
    ) -> _Sequence:
        """`known` is what rows of the same prompts have in common, so that it is worked out once."""
        self._check(row)
        ids, types = row.ids, self._token_types(row, known)
        grid = grids[images] if grids is not None and images else None
        self._check_images(types, len(images), grid)
        patches = [0] * len(images) if grid is None else grid.prod(-1).tolist()
        names = [work.number(unique[image], count) for image, count in zip(images, patches, strict=True)]
        spans = _spans(types)
        key = list(ids)
        for (start, length), name in zip(spans, names, strict=False):
            key[start : start + length] = [-1 - name] * length
        work.note(tuple(key), len(row.turns[0].prompt_ids))
        starts = [start for start, _ in spans] if grid is not None else [0] * len(images)
        return _Sequence(row, ids, types, self._positions(types, grid, known), images, starts, tuple(key))

    def _grids(
        self, unique: Sequence[bytes], fresh: Sequence[int], read: Tensor | None, work: StepWork
    ) -> Tensor | None:
        """[M, 3] of the batch's different images; None where the model has none."""
        if not unique or self._rope_index is None:
            return read
        new = dict(zip(fresh, [] if read is None else read, strict=True))
        return torch.stack([new[n] if n in new else work.features[image].grid for n, image in enumerate(unique)])

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

    def _token_types(self, row: Row, known: dict[Any, Any]) -> bytes:
        """1 at image placeholders. By span: a response is text whatever its ids are."""
        pieces = []
        for turn in row.turns:
            if turn.prompt_ids not in known:
                known[turn.prompt_ids] = bytes(token == self._image_token for token in turn.prompt_ids)
            pieces += [known[turn.prompt_ids], bytes(len(turn.response_ids))]
        return b"".join(pieces)

    def _positions(self, types: bytes, grid: Tensor | None, known: dict[Any, Any]) -> Tensor:
        """[4, 1, L] or [1, L]; `known` has those of beginnings up to the last image."""
        text = torch.arange(len(types))
        if self._rope_index is None:
            return text[None]
        head = max((start + length for start, length in _spans(types)), default=0)
        if not head:
            return text.expand(4, 1, -1)
        alike = (types[:head], tuple(grid.flatten().tolist()) if grid is not None else ())
        if alike not in known:
            first = torch.tensor([list(types[:head])])
            known[alike] = self._rope_index(first, first, image_grid_thw=grid)[0]
        places = known[alike]
        rest = torch.arange(len(types) - head) + (places.max() + 1)  # text goes on after the farthest place
        return torch.cat([text[None, None], torch.cat([places, rest.expand(3, 1, -1)], dim=-1)])

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

    def _check_images(self, types: bytes, images: int, grid: Tensor | None) -> None:
        spans = [length for _, length in _spans(types)]
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
    known: dict[bytes, int] = {}
    unique: list[bytes] = []
    numbers: list[list[int]] = []
    for row in rows:
        numbers.append([])
        for image in row.images:
            number = known.setdefault(image, len(unique)) if once else len(unique)
            if number == len(unique):
                unique.append(image)
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


def _spans(types: bytes) -> list[tuple[int, int]]:
    """(start, length) of the runs of ones."""
    return [(run.start(), len(run.group())) for run in re.finditer(rb"\x01+", types)]


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
