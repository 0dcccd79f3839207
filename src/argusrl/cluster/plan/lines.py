"""Tables of a plan: lines of bytes, each with its formula, and the phases of a step in which it is there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PHASES = (
    "rollout",
    "hand-over",
    "tower",
    "head",
    "backward",
    "update",
    "publication",
    "loading",
    "checkpoint",
)
"""Of a step, in order. tower … update are training; publication is the ranks' part of it, loading that of engines."""

TRAINING = ("tower", "head", "backward", "update")
ALWAYS = PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """So many bytes in these phases. `inputs` are the numbers that stand in `formula`."""

    name: str
    size: int
    phases: Sequence[str]
    formula: str
    inputs: Mapping[str, float] = field(default_factory=dict)
    reclaimable: bool = False  # page cache: the kernel gives it back before anything fails
    group: str = ""  # lines of one group are one row for people

    def in_phase(self, phase: str) -> int:
        return self.size if phase in self.phases else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "bytes": self.size,
            "phases": list(self.phases),
            "formula": self.formula,
            "inputs": dict(self.inputs),
            "reclaimable": self.reclaimable,
            "group": self.group,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Memory of one thing of which there are `count`: a GPU, a worker node, the head."""

    title: str
    lines: Sequence[Line]
    capacity: int | None  # bytes; None: not known
    count: int = 1

    def total(self, phase: str) -> int:
        """Without what the kernel can take back."""
        return sum(line.in_phase(phase) for line in self.lines if not line.reclaimable)

    @property
    def totals(self) -> dict[str, int]:
        return {phase: self.total(phase) for phase in PHASES}

    def peak(self, phases: Collection[str] = PHASES) -> tuple[str, int]:
        """The phase that needs most, and how much it needs."""
        totals = {phase: self.total(phase) for phase in PHASES if phase in phases}
        fullest = max(totals, key=totals.__getitem__)
        return fullest, totals[fullest]

    def rows(self) -> dict[str, list[int]]:
        """For people: bytes by phase of each line, or of each group of lines; those that are 0 are left out."""
        rows: dict[str, list[int]] = {}
        for line in self.lines:
            sizes = [line.in_phase(phase) for phase in PHASES]
            name = line.group or line.name + (" *" if line.reclaimable else "")
            if any(sizes):
                rows[name] = [old + new for old, new in zip(rows.get(name, [0] * len(PHASES)), sizes, strict=True)]
        return rows

    def size(self, name: str) -> int:
        """Bytes of the line of that name, 0 where there is none."""
        return sum(line.size for line in self.lines if line.name == name)

    def to_json(self) -> dict[str, Any]:
        phase, peak = self.peak()
        return {
            "count": self.count,
            "capacity_bytes": self.capacity,
            "lines": [line.to_json() for line in self.lines],
            "phases": {
                one: {line.name: line.in_phase(one) for line in self.lines if line.in_phase(one)} for one in PHASES
            },
            "totals": self.totals,
            "peak_bytes": peak,
            "peak_phase": phase,
        }
