"""Follows the records of episodes that have not finished, and says how far each had come.

Tries of an episode follow each other in the journal, and the newest one counts: `started` begins the key anew, and
what a later try says about a turn takes the place of everything from there on.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from argusrl.journal.records import Failed, Partial, Record, Started, TurnDone
from argusrl.types import TrajectoryKey, Turn, Unfinished


@dataclass(slots=True)
class _Episode:
    turns: list[Turn] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("q"))  # of the open reply
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    place: str = ""

    def add_turn(self, index: int, turn: Turn) -> None:
        if index <= len(self.turns):  # a gap would be a lost record: what lies before it is still good
            self._open(index)
            self.turns.append(turn)

    def add_partial(self, record: Partial) -> None:
        if record.turn < len(self.turns) and record.offset == 0:
            self._open(record.turn)
        continues = record.turn == len(self.turns) and record.offset <= len(self.ids)
        if continues and len(record.ids) == len(record.logprobs):
            self.place = record.place
            self.ids[record.offset :] = array("q", record.ids)
            self.logprobs[record.offset :] = array("d", record.logprobs)

    def _open(self, index: int) -> None:
        """Go back to the start of reply `index`."""
        del self.turns[index:], self.ids[:], self.logprobs[:]


class RunningEpisodes:
    """Feed it the records of all segments in order. It holds tokens of unfinished episodes alone."""

    def __init__(self, adapter_sha256: str) -> None:
        self._adapter_sha256 = adapter_sha256
        self._episodes: dict[TrajectoryKey, _Episode] = {}
        self._finished: set[TrajectoryKey] = set()

    def follow(self, record: Record) -> None:
        """Take any record but a `finished` one."""
        if isinstance(record, Started):
            self._episodes.pop(record.key, None)
            if record.adapter_sha256 == self._adapter_sha256 and record.key not in self._finished:
                self._episodes[record.key] = _Episode()
        elif isinstance(record, TurnDone):
            if episode := self._of(record.key, record.turn.adapter_sha256):
                episode.add_turn(record.index, record.turn)
        elif isinstance(record, Partial):
            if episode := self._of(record.key, record.adapter_sha256):
                episode.add_partial(record)
        elif isinstance(record, Failed):
            self._episodes.pop(record.failure.key, None)

    def finished(self, key: TrajectoryKey, *, counts: bool) -> None:
        """The episode is over; if that counts, no later try of it does."""
        self._episodes.pop(key, None)
        if counts:
            self._finished.add(key)

    def unfinished(self) -> dict[TrajectoryKey, Unfinished]:
        """Every episode of which there is at least a token."""
        return {
            key: Unfinished(turns=tuple(one.turns), ids=tuple(one.ids), logprobs=tuple(one.logprobs), place=one.place)
            for key, one in self._episodes.items()
            if one.turns or one.ids
        }

    def _of(self, key: TrajectoryKey, adapter_sha256: str) -> _Episode | None:
        if adapter_sha256 != self._adapter_sha256:
            self._episodes.pop(key, None)
        return self._episodes.get(key)
