"""Samples that end their step: who is suspected, told apart from the others, and left out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from argusrl.errors import NumericsError
from argusrl.journal.quarantine import quarantine, quarantined
from argusrl.types import TrajectoryKey

if TYPE_CHECKING:
    from argusrl.training.run import Run

_CHANCE = 2  # deaths of a rank in the same samples that prove nothing


@dataclass
class Suspects:
    """What this driver knows about the samples of the open step."""

    run: Run
    deaths: Counter[tuple[int, tuple[str, ...]]] = field(default_factory=Counter)  # by step and samples
    accused: tuple[str, ...] = ()

    def accuse(self, keys: tuple[str, ...]) -> str:
        """Remember which samples a fault points at; what stands for them in the history of faults."""
        self.accused = keys
        return keys[0] if len(keys) == 1 else f"one of {len(keys)} samples from {keys[0]}"

    def accused_by_death(self, member: str) -> str:
        """The same for a rank that was lost, where its samples are to blame; "" where it may be chance.

        Once every sample is computed on its own, one death says enough.
        """
        keys = self._computed_by(member)
        step = self.run.workers.position.step
        self.deaths[step, keys] += 1
        if keys and (self.deaths[step, keys] > _CHANCE or self.run.isolated_step == step):
            return self.accuse(keys)
        return ""

    def _computed_by(self, member: str) -> tuple[str, ...]:
        """The samples that a rank computed when it was lost; () where its note says nothing."""
        run = self.run
        number = next((n for n, name in enumerate(run.workers.ranks.names) if name == member), None)
        if number is None:
            return ()
        try:
            note = json.loads(run.folder.suspect(number).read_bytes())
        except (OSError, ValueError):
            return ()
        keys: Sequence[str] = note["keys"]
        return tuple(keys) if (note["epoch"], note["step"]) == (run.epoch.number, run.workers.position.step) else ()

    def isolate(self) -> None:
        """From now on the samples of the open step are computed one by one."""
        self.run.isolated_step = self.run.workers.position.step

    def leave_out(self, reason: str) -> None:
        """Leave the accused sample out of the open step, if it is one. Raises NumericsError when they become many."""
        if len(self.accused) != 1:  # they are told apart first
            return
        run, name = self.run, self.accused[0]
        step, algorithm = run.workers.position.step, run.config.algorithm
        total = algorithm.prompts_per_step * algorithm.group_size
        left_out = len(quarantined(run.folder, step)) + 1
        if left_out > run.config.rollout.max_failed_share * total:
            raise NumericsError(
                f"step {step}: {left_out} of {total} samples would have to be left out: {reason}",
                "the weights or the data are broken: look at attempts/*/logs/rank*.log",
            )
        prompt, _, sample = name.rpartition("/")
        quarantine(run.folder, TrajectoryKey(step, prompt, int(sample)), reason)
        run.say("quarantined", f"step {step} goes on without {name}: {reason}", warning=True, step=step, sample=name)
