"""Keeps calls of a fenced driver, or of an older step, from touching a worker."""

from __future__ import annotations

from argusrl.errors import FencedError


class Fence:
    """Every call to a worker carries (epoch, step); lower ones than seen before are refused."""

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0

    def check(self, epoch: int, step: int) -> None:
        """Raises FencedError for a call from an older epoch, or for an older step of the same epoch."""
        if (epoch, step) < (self.epoch, self.step):
            raise FencedError(
                f"a call for epoch {epoch}, step {step} reached a worker at epoch {self.epoch}, step {self.step}",
                "another driver owns this run now; stop this one",
            )
        self.epoch, self.step = epoch, step
