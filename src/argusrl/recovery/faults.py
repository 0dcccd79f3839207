"""What went wrong, in one shape for everything that can: the rule in decide.py reads nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FaultKind = Literal["engine", "rank", "episode_worker", "node", "driver", "storage", "numerics", "sample", "corruption"]
FaultHow = Literal["died", "hung", "raised"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. Equal `step` means that no step was committed in between."""

    kind: FaultKind
    member: str  # which one: "engine 0", "rank 1", a node, a trajectory's key; of a driver the class of its error
    how: FaultHow
    step: int  # last committed step when it happened
    time: float  # seconds since 1970
    message: str  # one sentence for people

    def like(self, other: Fault) -> bool:
        """Whether this is the same fault again, without a committed step in between."""
        return (self.kind, self.member, self.how, self.step) == (other.kind, other.member, other.how, other.step)
