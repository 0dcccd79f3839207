"""Fires the shots of a rehearsal. A worker shoots itself when it is told to, so this works on any cluster."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

from argusrl.errors import StorageError
from argusrl.recovery.failpoints import How, Rehearsal, Shot

if TYPE_CHECKING:
    from argusrl.training.run import Run

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def rehearsal_of(run: Run) -> Rehearsal | None:
    """The shots that this run has to survive; None for an ordinary run."""
    return Rehearsal.of(run.folder, lambda number, shot: shoot(run, number, shot))


def shoot(run: Run, number: int, shot: Shot) -> None:
    """Note the shot, and fire it: the driver at itself, or by a call that lets a worker do so."""
    workers = run.workers
    fleet = {"engine": workers.engines, "rank": workers.ranks, "episode_worker": workers.episodes}.get(shot.victim)
    place = shot.number % len(fleet.members) if fleet is not None else 0
    with suppress(StorageError):
        run.events.write(
            "shot",
            f"rehearsal: {shot.how} {shot.victim.replace('_', ' ')} {place} at {shot.point}",
            shot=number,
            point=shot.point,
            victim=shot.victim,
            member="driver" if fleet is None else fleet.name(place),
            how=shot.how,
            step=run.state.step + 1,
            attempt=run.attempt,
            epoch=run.epoch.number,
        )
    if fleet is None:
        shoot_oneself(shot.how)
    else:
        fleet.members[place].actor.die.remote(run.epoch.number, number, shot.how)


def shoot_oneself(how: How) -> None:
    """This process ends here, or stops until somebody wakes or kills it."""
    os.kill(os.getpid(), _SIGNALS[how])
