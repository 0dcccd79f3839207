"""events.jsonl: one line for each fault, decision and recovery."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from argusrl.observe.redact import Redactor
from argusrl.storage.publish import append_line, read_lines


class EventLog:
    """Appends events, each durable when `write` returns. Safe to use from several threads."""

    def __init__(
        self, path: Path, redactor: Redactor | None = None, heard: Callable[[str], None] | None = None
    ) -> None:
        """`heard` is told the kind of every event that was written."""
        self._path = path
        self._redactor = redactor or Redactor()
        self._heard = heard
        self._lock = threading.Lock()

    def write(self, kind: str, message: str, **fields: Any) -> dict[str, Any]:
        """Append {time, kind, message, **fields} with secrets masked, and return it. Raises StorageError."""
        event = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind, "message": message}
        event |= self._redactor.value({name: value for name, value in fields.items() if name not in event})
        event["message"] = self._redactor.text(message)
        with self._lock:
            append_line(self._path, event)
        if self._heard is not None:
            self._heard(kind)
        return event


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events in order; a line torn by a crash is left out."""
    return read_lines(path)


def event_seconds(event: dict[str, Any]) -> float:
    """When it was written: seconds since 1970."""
    return datetime.fromisoformat(event["time"]).timestamp()
