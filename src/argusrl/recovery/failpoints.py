"""Named points of a run, and shots that are fired at them: how a rehearsal kills things at a chosen moment.

The plan lies in `<run>/rehearsal.json`; an ordinary run has none, and a point then costs one test. Every shot is fired
at most once: its marker in `<run>/rehearsal/` is durable before it, so that a driver that shot itself does not do it
again when it comes back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from argusrl.errors import ArgusError, ConfigError
from argusrl.storage.files import exists
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import make_folder, publish_file
from argusrl.storage.sealed_json import encode_sealed, read_sealed

Point = Literal[
    "started",
    "rollout_begun",
    "rollout_half",
    "rollout_done",
    "training",
    "updated",
    "staged",
    "published",
    "synced",
    "committing",
    "committed",
    "checkpointing",
    "evaluating",
    "recovering",
    "attached",
    "ranks_connected",
    "replayed",
    "restored",
]
Victim = Literal["engine", "rank", "episode_worker", "driver"]
How = Literal["kill", "stop"]  # SIGKILL, SIGSTOP

STEP_POINTS: tuple[Point, ...] = (
    "rollout_begun",
    "rollout_half",
    "rollout_done",
    "training",
    "updated",
    "staged",
    "published",
    "synced",
    "committing",
    "committed",
    "checkpointing",
)
"""Passed in every step, in this order ("checkpointing" where a checkpoint is due)."""

RECOVERY_POINTS: tuple[Point, ...] = ("recovering", "attached", "ranks_connected", "replayed", "restored")
"""Passed while a run comes back: a shot there is a second fault before the first one is healed."""

VICTIMS: tuple[Victim, ...] = ("engine", "rank", "episode_worker", "driver")


class Shot(msgspec.Struct, frozen=True, kw_only=True):
    """One process is killed or stopped: the first time `point` is passed with `step`, or a later one, open."""

    point: Point
    step: int  # the open step: last committed one + 1
    victim: Victim
    number: int = 0  # which one of its kind; numbers beyond the last start over
    how: How = "kill"
    after_seconds: float = 0.0  # later than the point: something is hit while it works


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is shot in one run. `seed` is for people: what the plan was drawn from."""

    shots: tuple[Shot, ...]
    seed: int = 0


@dataclass(slots=True)
class Rehearsal:
    """The plan of a run as its driver follows it. `fire` does what a shot says, after its marker is durable."""

    folder: RunFolder
    plan: Plan
    fire: Callable[[int, Shot], None]
    fired: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, folder: RunFolder, fire: Callable[[int, Shot], None]) -> Rehearsal | None:
        """None for a run without a plan. Raises CorruptionError, ConfigError."""
        plan = read_plan(folder)
        if plan is None:
            return None
        fired = {number for number in range(len(plan.shots)) if exists(folder.shot(number))}
        return cls(folder, plan, fire, fired)

    def reached(self, point: Point, step: int) -> None:
        """`point` is passed while `step` is open: shots that wait for it are fired, now or a little later."""
        for number, shot in enumerate(self.plan.shots):
            if number in self.fired or shot.point != point or step < shot.step:
                continue
            self.fired.add(number)
            if shot.after_seconds > 0.0:
                timer = threading.Timer(shot.after_seconds, self._shoot, (number, shot))
                timer.daemon = True  # a run that ends before the shot is not kept waiting
                timer.start()
            else:
                self._shoot(number, shot)

    def _shoot(self, number: int, shot: Shot) -> None:
        try:
            make_folder(self.folder.rehearsal)
            publish_file(self.folder.shot(number), encode_sealed(msgspec.to_builtins(shot)))
        except FileExistsError:  # another driver of this run fired it
            return
        except ArgusError as error:
            logging.getLogger(__name__).warning("shot %d is not fired: %s", number, error.message)
            return
        self.fire(number, shot)


def write_plan(folder: RunFolder, plan: Plan) -> None:
    """Make a run a rehearsal, before it starts. Raises FileExistsError if it has a plan, StorageError."""
    publish_file(folder.rehearsal_plan, encode_sealed(msgspec.to_builtins(plan)))


def read_plan(folder: RunFolder) -> Plan | None:
    """None for an ordinary run. Raises CorruptionError if it is damaged, ConfigError if it is no plan."""
    if not exists(folder.rehearsal_plan):
        return None
    fields: dict[str, Any] = read_sealed(folder.rehearsal_plan)
    try:
        return msgspec.convert(fields, Plan)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder.rehearsal_plan} is not a plan of shots: {error}") from error


def fired_shots(folder: RunFolder, plan: Plan) -> Sequence[int]:
    """Numbers of the shots that have been fired."""
    return [number for number in range(len(plan.shots)) if exists(folder.shot(number))]
