"""A rehearsal: a short run of a recipe, once undisturbed and once shot at, and what to compare afterwards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from argusrl.config.sections import Config
from argusrl.journal.commits import Commit, CommitChain
from argusrl.recovery.failpoints import (
    RECOVERY_POINTS,
    STEP_POINTS,
    How,
    Plan,
    Point,
    Shot,
    Victim,
)
from argusrl.storage.layout import RunFolder

FIRST_STEP = 2  # of the first shot: step 1 tells how long a cold start takes
DELAYS_SECONDS = (0.0, 0.0, 0.05, 0.2, 0.5)
_COMPARED = ("adapter", "state_digest", "prompt_position", "trajectories")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of one recipe, step by step."""

    steps: int  # compared
    equal: int  # of them: steps whose logical digests agree
    differences: tuple[str, ...]  # one line for each step that differs, or is missing

    @property
    def equivalent(self) -> float:
        """Share of steps that agree."""
        return self.equal / self.steps if self.steps else 0.0


def rehearsed(config: Config, *, shots: int, name: str) -> Config:
    """The recipe shortened to what `shots` need: one step each, one before and one after. No evaluation."""
    changes: dict[str, Any] = {
        "run": config.run.model_copy(update={"name": name}),
        "algorithm": config.algorithm.model_copy(update={"num_steps": shots + 2}),
        "evaluate": config.evaluate.model_copy(update={"every_steps": 0}),
    }
    return config.model_copy(update=changes)


def draw_plan(
    victims: Sequence[Victim],
    shots: int,
    seed: int,
    *,
    hows: Sequence[How] = ("kill",),
    points: Sequence[Point] = STEP_POINTS,
    second_faults: int = 0,
    spacing: int = 1,
    delays_seconds: Sequence[float] = DELAYS_SECONDS,
) -> Plan:
    """One shot every `spacing` steps from FIRST_STEP on: victims in turn, point and delay drawn from the seed.

    `second_faults` more shots meet the recovery from one of the others.
    """
    dice = random.Random(f"rehearsal {seed}")
    drawn = [
        Shot(
            point=dice.choice(points),
            step=FIRST_STEP + spacing * number,
            victim=victims[(number + seed) % len(victims)],
            number=dice.randrange(64),
            how=dice.choice(hows),
            after_seconds=dice.choice(delays_seconds),
        )
        for number in range(shots)
    ]
    heals = [shot for shot in drawn if shot.victim != "engine"] or drawn
    for _ in range(second_faults):
        first = dice.choice(heals)
        # Not a rank twice in one step: that points at a sample, and the step is then computed one by one.
        others = [victim for victim in victims if victim not in (first.victim, "engine")] or list(victims)
        drawn.append(
            Shot(
                point=dice.choice(RECOVERY_POINTS),
                step=first.step,
                victim=dice.choice(others),
                number=dice.randrange(64),
                after_seconds=dice.choice(DELAYS_SECONDS[:3]),
            )
        )
    return Plan(shots=tuple(drawn), seed=seed)


def compare_runs(calm: RunFolder, shot: RunFolder) -> Comparison:
    """Adapter, optimizer state, RNG, data position and rewards after every step of both. Raises CorruptionError."""
    chains = [CommitChain(calm), CommitChain(shot)]
    heads = [chain.head() for chain in chains]
    steps = max(-1 if head is None else head.step for head in heads) + 1
    differences = []
    for step in range(steps):
        if any(head is None or head.step < step for head in heads):
            differences.append(f"step {step} is committed in one of the two runs only")
            continue
        one, other = (chain.read(step) for chain in chains)
        differing = [what for what in _COMPARED if _logical(one, what) != _logical(other, what)]
        if differing:
            differences.append(f"step {step} differs in {', '.join(differing)}")
    return Comparison(steps, steps - len(differences), tuple(differences))


def _logical(commit: Commit, what: str) -> Any:
    if what == "adapter":
        return commit.adapter.version, commit.adapter.sha256
    if what == "trajectories":
        return [(one.key, one.reward) for one in commit.trajectories]
    return getattr(commit, what)
