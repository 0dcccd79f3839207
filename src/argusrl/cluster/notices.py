"""What a controller saw, decided and told, in `controller.jsonl` of the run folder: for people, and for one another."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from argusrl.errors import StorageError
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import append_line, read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that somebody should hear of."""

    run: str
    kind: str  # "stall" | "fault" | "budget" | "end" | "reward" | "node" | "storage"
    text: str
    key: str  # the same for the same thing
    values: Mapping[str, Any] = field(default_factory=dict)


class Notifier(Protocol):
    """Passes notices on. Never raises, never waits."""

    def send(self, notice: Notice) -> None: ...


@dataclass(slots=True)
class Notices:
    """The events of one run. What cannot be written because storage is away is kept from repeating all the same."""

    run: RunFolder
    wall: Callable[[], float] = time.time
    host: str = field(default_factory=socket.gethostname)
    _told: set[str] | None = None
    _last: dict[str, str] = field(default_factory=dict)

    def events(self) -> list[dict[str, Any]]:
        """All so far; none while storage is away."""
        try:
            return read_lines(self.run.controller_events)
        except StorageError:
            return []

    def write(self, kind: str, **fields: Any) -> None:
        """Append an event where that is possible: nothing depends on it."""
        try:
            append_line(self.run.controller_events, {"time": self.wall(), "kind": kind, "by": self.host, **fields})
        except StorageError:
            return

    def write_once(self, kind: str, message: str) -> None:
        """Append a message unless it is the last one of its kind."""
        if self._last.get(kind) != message:
            self._last[kind] = message
            self.write(kind, message=message)

    def tell_once(self, notifiers: list[Notifier], notice: Notice) -> bool:
        """Pass a notice on, unless a controller has said before that it did; whether it was passed on.

        Once, but for two controllers that find the same at the same moment, and for one that cannot reach storage: a
        notice that comes twice is better than one that is lost.
        """
        if self._told is None or notice.key not in self._told:
            self._told = {event["key"] for event in self.events() if event.get("kind") == "told"} | (
                self._told or set()
            )
        if notice.key in self._told:
            return False
        self._told.add(notice.key)
        self.write("told", key=notice.key, about=notice.kind, text=notice.text)
        for notifier in notifiers:
            notifier.send(notice)
        return True
