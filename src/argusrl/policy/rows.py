"""What a rank trains on: one row per trajectory. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from argusrl.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTurn:
    """One turn of a row."""

    prompt_ids: tuple[int, ...]  # [P] new prompt tokens, images expanded
    response_ids: tuple[int, ...]  # [R]
    logprobs: tuple[float, ...]  # [R] of the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A trajectory with its advantage and its images (encoded bytes of all turns, in reading order)."""

    turns: tuple[RowTurn, ...]
    advantage: float
    images: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, trajectory: Trajectory, advantage: float, images: Mapping[str, bytes]) -> Row:
        """`images` maps sha256 to encoded bytes. Raises KeyError where one of the trajectory's is missing."""
        return cls(
            turns=tuple(
                RowTurn(prompt_ids=turn.prompt_ids, response_ids=turn.response_ids, logprobs=turn.logprobs)
                for turn in trajectory.turns
            ),
            advantage=advantage,
            images=tuple(images[ref.sha256] for turn in trajectory.turns for ref in turn.images),
        )

    @property
    def tokens(self) -> int:
        """L, of the whole sequence."""
        return sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in self.turns)

    @property
    def ids(self) -> list[int]:
        """[L] the whole sequence as the last turn's engine call and its reply saw it."""
        return [token for turn in self.turns for token in (*turn.prompt_ids, *turn.response_ids)]
