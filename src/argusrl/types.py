"""The nouns of argusrl. One word each, everywhere: code, recipes, metrics, docs. Standard library only.

Shapes in comments: [P] prompt tokens new in a turn, [R] response tokens of a turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class StopReason(StrEnum):
    """Why the engine stopped sampling a turn."""

    STOP = "stop"  # an end token was sampled
    LENGTH = "length"  # the token limit was reached
    ABORTED = "aborted"  # the request was cancelled


class EpisodeEnd(StrEnum):
    """Why an episode ended. Terminated (the task is over) and truncated (a limit cut it) are different."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One validated image: encoded bytes (PNG or JPEG, RGB, upright), addressed by their content."""

    data: bytes
    width: int  # pixels
    height: int  # pixels
    _sha256: str = field(default="", init=False, repr=False, compare=False)  # once somebody asked for it

    @property
    def sha256(self) -> str:
        """Hex digest of the encoded bytes."""
        if not self._sha256:
            object.__setattr__(self, "_sha256", hashlib.sha256(self.data).hexdigest())
        return self._sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message: text and images in reading order."""

    role: str  # "system" | "user" | "assistant"
    content: tuple[str | Image, ...]

    @property
    def images(self) -> tuple[Image, ...]:
        """The images of this message in reading order."""
        return tuple(part for part in self.content if isinstance(part, Image))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data set, or one start of an environment.

    `messages` may be empty where the environment writes the first message itself. `info` holds what else
    the row carries (environment seed and options, extra columns for rewards); it must be JSON-like.
    """

    id: str
    messages: tuple[Message, ...] = ()
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRef:
    """Where one encoded image lies in the run folder."""

    sha256: str
    segment: str  # path relative to the run folder, e.g. "images/000012/w0.e0003.seg"
    offset: int  # bytes from the start of the segment to the record
    length: int  # bytes of the whole framed record
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model reply. Token lists are append-only: what turn k saw is everything before it plus its own prompt ids.

    Example: "<image> how many dots?" (12 text + 9 image tokens), reply "4<end>" ->
        prompt_ids has 21 ids, collapsed_ids 13 (one placeholder per image), response_ids 2, logprobs 2.
    """

    prompt_ids: tuple[int, ...]  # [P] new prompt tokens of this turn, image placeholders expanded (trainer)
    collapsed_ids: tuple[int, ...]  # the same with one placeholder per image (engine)
    response_ids: tuple[int, ...]  # [R] sampled ids, end token included
    logprobs: tuple[float, ...]  # [R] natural log, of the distribution that was sampled from
    images: tuple[ImageRef, ...]  # images new in this turn, in reading order
    adapter_version: int  # that sampled every id above
    adapter_sha256: str  # its logical digest
    stop: StopReason
    action: str | None = None  # what the environment was given (multi-turn), for replay


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryKey:
    """Names a trajectory: sample `sample` of prompt `prompt_id` in step `step`."""

    step: int
    prompt_id: str
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """All turns of one episode, its rewards and why it ended."""

    key: TrajectoryKey
    turns: tuple[Turn, ...]
    reward: float  # weighted sum of `rewards`
    rewards: Mapping[str, float]
    end: EpisodeEnd
    seed: int
    text: tuple[str, ...] = ()  # decoded replies, one per turn (for people and for rescoring)
    answer: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """How far an interrupted episode had come: whole turns, then the reply that was still being sampled."""

    turns: tuple[Turn, ...]
    ids: tuple[int, ...] = ()  # [T] of the open reply, so far
    logprobs: tuple[float, ...] = ()  # [T]
    place: str = ""  # digest of all tokens and images before the open reply; "" if it was not kept


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRef:
    """What the driver holds of a trajectory: scalars and where the record lies. No tokens, no pixels."""

    key: TrajectoryKey
    segment: str  # relative to the run folder
    offset: int
    length: int
    reward: float
    rewards: Mapping[str, float]
    prompt_tokens: int  # all prompt ids of all turns, expanded
    response_tokens: int
    image_patches: int  # vision patches before merging, 0 for text only
    truncated: bool
    first_prompt_tokens: int = 0  # of prompt_tokens, those of the first turn: a group computes them once


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFailure:
    """An episode that counts for nothing: the reason is data, never a zero reward."""

    key: TrajectoryKey
    kind: str  # "environment" | "reward" | "request" | "timeout" | "refused"
    source: str  # which environment, reward or service
    message: str
    infrastructure: bool = False  # trying again later makes sense


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """One published, immutable adapter version."""

    version: int  # 0 is the adapter before the first step
    epoch: int
    path: str  # relative to the run folder, e.g. "adapters/v000012.e0003"
    sha256: str  # logical digest: over names, shapes, dtypes and bytes of the tensors in name order
    file_sha256: str  # of adapter_model.safetensors


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """What the files of an adapter version hold, in memory: engines load it from here while the folder is written."""

    config: bytes  # adapter_config.json; empty in full-parameter training
    tensors: NDArray[np.uint8]  # [bytes] the whole safetensors file; processes share it, so it may be read-only
