"""attempts/NNN/phases.jsonl: what a driver did from when to when. The recovery report adds it up."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argusrl.storage.publish import encode_line, read_lines


@dataclass(frozen=True, slots=True)
class PhaseLog:
    """Appends {time, phase, step, epoch}. Not durable: it survives the process, and nothing depends on it."""

    path: Path

    def note(self, phase: str, *, step: int, epoch: int) -> None:
        """From now on the driver is in `phase`, with `step` open."""
        line = encode_line({"time": time.time(), "phase": phase, "step": step, "epoch": epoch})
        with suppress(OSError):  # a full disk is noticed where it matters
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)


def read_phases(path: Path) -> list[dict[str, Any]]:
    """All entries in order; [] for an attempt that noted none."""
    return read_lines(path)
