"""What a rank has of one step: the vision tower's outputs, and what was pushed through the model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from argusrl.policy.prefix_tree import grow
from argusrl.policy.stats import Compute

FEATURE_BYTES = 1 << 30
"""Tower outputs that are kept at most. One image has merged tokens × hidden size × (1 + DeepStack layers) numbers: of
1 megapixel in Qwen3-VL-8B in bfloat16 1,024 × 4,096 × 4 × 2 bytes = 32 MiB."""


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """The tower's output for one image of n merged tokens, without gradient."""

    grid: Tensor  # [3] patches in time, height and width
    tokens: Tensor  # [n, H]
    deep: tuple[Tensor, ...]  # [n, H] per DeepStack layer

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.tokens, *self.deep))


class StepWork:
    """Of one rank. The tower is frozen, so each different image has to go through it once a step.

    No dataclass: it is handed to a forward, and FSDP looks for tensors inside of dataclasses.
    """

    def __init__(self) -> None:
        self.features: dict[bytes, ImageFeatures] = {}  # by encoded image
        self.tokens = 0  # pushed through the language model, as often as that was
        self.patches = 0  # pushed through the tower
        self.places = 0  # of attention's queries
        self.padding = 0  # of them, without a token
        self._images: dict[bytes, tuple[int, int]] = {}  # -> number in the step, patches
        self._shown = 0  # patches of all rows, each row's own
        self._updates: list[dict[tuple[int, ...], list[tuple[int, ...]]]] = []  # of each: first prompt -> sequences

    def begin_update(self) -> None:
        """Weights are others than in the update before: what the two have in common has to be computed in both."""
        self._updates.append({})

    def number(self, image: bytes, patches: int) -> int:
        """Equal for equal images."""
        self._shown += patches
        return self._images.setdefault(image, (len(self._images), patches))[0]

    def note(self, sequence: tuple[int, ...], prompt_tokens: int) -> None:
        """Hear of a row: its ids, images as negative numbers, and how many tokens its first prompt has."""
        if not self._updates:  # a forward outside of updates
            self.begin_update()
        self._updates[-1].setdefault(sequence[:prompt_tokens], []).append(sequence)

    def keep(self, images: Collection[bytes] | None = None) -> None:
        """Drop the outputs of other images; without `images` the oldest ones where all are too many."""
        if images is not None:
            self.features = {image: held for image, held in self.features.items() if image in images}
        used = sum(held.bytes for held in self.features.values())
        for image in list(self.features):
            if used <= FEATURE_BYTES:
                break
            used -= self.features.pop(image).bytes

    def share(self) -> Share:
        """What the other ranks have to know to count what all did."""
        images = {number: hashlib.sha256(image).digest()[:16] for image, (number, _) in self._images.items()}
        updates = [[sequence for alike in groups.values() for sequence in alike] for groups in self._updates]
        return Share(
            counts=Compute(
                tokens=self.tokens,
                row_tokens=sum(len(sequence) for sequences in updates for sequence in sequences),
                unique_tokens=sum(grow(sequences, worth=0.0).tokens for sequences in updates),
                patches=self.patches,
                row_patches=self._shown,
                unique_patches=sum(patches for _, patches in self._images.values()),
                places=self.places,
                padding=self.padding,
            ),
            prompts=tuple(frozenset(_shared(prompt, images) for prompt in groups) for groups in self._updates),
            images={images[number]: patches for number, patches in self._images.values()},
        )


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a step's work, with what it has in common with other ranks by digest."""

    counts: Compute
    prompts: tuple[frozenset[tuple[int, ...]], ...]  # of each update, the first prompts
    images: dict[bytes, int]  # -> patches


def of_all(shares: Iterable[Share], passes: int) -> Compute:
    """The work of all ranks. First prompts and images that several ranks have count once in what was needed.

    `passes` is how often the step has to go through the language model. Of a group that was cut over ranks, replies
    that begin alike on different ranks count as different.
    """
    found = list(shares)
    twice = sum(_repeated_prompts(of_ranks) for of_ranks in zip(*(share.prompts for share in found), strict=True))
    total = {name: sum(getattr(share.counts, name) for share in found) for name in Compute.__slots__}
    total["unique_tokens"] = (total["unique_tokens"] - twice) * passes
    total["row_tokens"] *= passes
    total["unique_patches"] -= _repeated([share.images for share in found])
    return Compute(**total)


def _repeated(tables: Sequence[dict[bytes, int]]) -> int:
    """Sum of what is in a table and in one before it."""
    return sum(sum(table.values()) for table in tables) - sum({k: v for t in tables for k, v in t.items()}.values())


def _repeated_prompts(of_ranks: Sequence[frozenset[tuple[int, ...]]]) -> int:
    """Tokens that prompts of a rank have in common with those of a rank before it."""
    distinct = [prompts for prompts in (*of_ranks, frozenset().union(*of_ranks)) if prompts]
    *own, together = (grow(sorted(prompts), worth=0.0).tokens for prompts in distinct) if distinct else (0,)
    return sum(own) - together


def _shared(prompt: tuple[int, ...], images: dict[int, bytes]) -> tuple[int, ...]:
    """A prompt's ids, its images named alike on all ranks, whatever numbers these gave them."""
    return tuple(-1 - int.from_bytes(images[-1 - token][:7]) if token < 0 else token for token in prompt)
