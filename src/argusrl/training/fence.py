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

    def enter(self, epoch: int) -> None:
        """The first call of a driver, or of its new epoch. Raises FencedError for an older epoch."""
        self.check_epoch(epoch)
        if epoch > self.epoch:
            self.epoch, self.step = epoch, 0

    def check_epoch(self, epoch: int) -> None:
        """For calls that belong to no step. Raises FencedError for a call from an older epoch."""
        if epoch < self.epoch:
            raise FencedError(
                f"a call for epoch {epoch} reached a worker at epoch {self.epoch}",
                "another driver owns this run now; stop this one",
            )
