"""What a run folder says about a run on a cluster, looked at again and again; what is written once is read once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from argusrl.cluster.decide import BLAMELESS
from argusrl.cluster.observation import Folder
from argusrl.errors import ArgusError, CorruptionError, StorageError
from argusrl.journal.attempts import Heartbeat, Verdict, newest_attempt, read_heartbeat, read_verdict
from argusrl.journal.epochs import newest_epoch, numbered
from argusrl.journal.submissions import (
    JOB_KIND,
    Made,
    Submission,
    SubmissionEnd,
    read_end,
    read_made,
    read_submission,
)
from argusrl.storage.files import exists
from argusrl.storage.layout import RunFolder
from argusrl.storage.sealed_json import read_sealed

_LIVE_ATTEMPTS = 3  # whose heartbeats are looked at: an older driver may live on beside a newer one
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One look at a run folder."""

    folder: Folder = "well"
    problem: str = ""  # why it is not well
    submission: Submission | None = None  # the newest one that counts
    newest: int = 0  # number on record
    made: Made | None = None
    end: SubmissionEnd | None = None
    attempt: int = 0  # newest one of the run
    epoch: int = 0
    started: bool = False
    verdict: Verdict | None = None  # of the newest attempt, if that is of this submission
    complete: bool = False
    finished: bool = False  # its newest attempt, of whatever submission, was complete
    steps: int = 0
    fruitless: int = 0
    blamed: int = 0
    resubmissions: int = 0
    gpu_hours: float = 0.0
    sign_of_life: tuple[Any, ...] = ()  # differs from the one before when somebody is alive

    @property
    def number(self) -> int:
        return self.submission.number if self.submission is not None else 0

    @property
    def open_intent(self) -> bool:
        return self.submission is not None and self.submission.by_controller and self.made is None and self.end is None

    @property
    def is_job(self) -> bool:
        """Whether its submission is a job of a RayCluster that somebody else made."""
        return self.submission is not None and self.submission.kind == JOB_KIND

    @property
    def steps_ahead(self) -> int:
        return self.steps - (self.submission.steps if self.submission is not None else 0)


@dataclass(slots=True)
class RunRecord:
    """Looks at one run folder. Holds nothing but copies of write-once records."""

    run: RunFolder
    is_there: Callable[[], bool]  # whether the storage below which it lies is mounted
    _known: dict[int, Submission] = field(default_factory=dict)
    _made: dict[int, Made] = field(default_factory=dict)
    _ends: dict[int, SubmissionEnd] = field(default_factory=dict)
    _began: dict[int, float] = field(default_factory=dict)  # attempt → time of its first epoch's claim
    _epochs_read: int = 0
    _verdicts: dict[int, Verdict] = field(default_factory=dict)
    _spent: dict[int, float] = field(default_factory=dict)  # ended attempt → seconds
    _steps: int = 0

    def look(self) -> RunView:
        """Never raises: storage that is away or damaged is part of what is seen."""
        try:
            if not self.is_there() or (self._known and not exists(self.run.submissions)):
                return RunView(folder="away", problem=f"{self.run.path} is not there")
            return self._look()
        except CorruptionError as error:
            return RunView(folder="damaged", problem=error.message)
        except (StorageError, OSError) as error:
            return RunView(folder="away", problem=error.message if isinstance(error, ArgusError) else str(error))

    def _look(self) -> RunView:
        run, numbers = self.run, numbered(self.run.submissions, ".json")
        newest_number = numbers[-1] if numbers else 0
        if numbers and self._came_after_an_end(numbers[-1]):
            numbers.pop()
        number = numbers[-1] if numbers else 0
        submission = self.submission(number) if number else None
        attempt = newest_attempt(run)
        after = submission.after_attempt if submission is not None else 0
        beats = {one: read_heartbeat(run, one) for one in range(max(1, attempt - _LIVE_ATTEMPTS + 1), attempt + 1)}
        newest = self._verdict(attempt)
        started = attempt > after
        self._count_steps()
        history = [self.submission(one) for one in numbers]
        fruitless, blamed = _without_a_step(history)
        return RunView(
            submission=submission,
            newest=newest_number,
            made=self._made_of(number),
            end=self._end_of(number),
            attempt=attempt,
            epoch=newest_epoch(run),
            started=started,
            verdict=newest if started else None,
            complete=newest is not None
            and newest.complete
            and (started or (submission is not None and not submission.finished)),
            finished=newest is not None and newest.complete,
            steps=self._steps,
            fruitless=fruitless,
            blamed=blamed,
            resubmissions=sum(one.by_controller for one in history),
            gpu_hours=self._gpu_hours(history, beats),
            sign_of_life=(
                number,
                attempt,
                newest is not None,
                *(one.time if one is not None else 0.0 for one in beats.values()),
            ),
        )

    def _came_after_an_end(self, number: int) -> bool:
        """Whether one controller recorded this intent while another one recorded that the run ends: the end stands."""
        submission = self.submission(number)
        if not submission.by_controller:
            return False
        return self._end_of(submission.before) is not None and self._made_of(number) is None

    def _made_of(self, number: int) -> Made | None:
        if number not in self._made and (made := read_made(self.run, number) if number else None) is not None:
            self._made[number] = made
        return self._made.get(number)

    def _end_of(self, number: int) -> SubmissionEnd | None:
        if number not in self._ends and (end := read_end(self.run, number) if number else None) is not None:
            self._ends[number] = end
        return self._ends.get(number)

    def submission(self, number: int) -> Submission:
        """One submission on record. Raises StorageError."""
        if number not in self._known:
            self._known[number] = read_submission(self.run, number)
        return self._known[number]

    def made_ids(self) -> frozenset[str]:
        """Ids of the objects that submissions on record were seen as. Raises StorageError."""
        made = [self._made_of(number) for number in sorted(self._known)]
        return frozenset(one.uid for one in made if one is not None)

    def _verdict(self, attempt: int) -> Verdict | None:
        if attempt and attempt not in self._verdicts:
            verdict = read_verdict(self.run, attempt)
            if verdict is None:
                return None
            self._verdicts[attempt] = verdict
        return self._verdicts.get(attempt)

    def _count_steps(self) -> None:
        while exists(self.run.commit(self._steps + 1)):
            self._steps += 1

    def _gpu_hours(self, history: list[Submission], beats: dict[int, Heartbeat | None]) -> float:
        """Of all attempts that submissions made, by the clock of each driver's machine: from its claim to its end."""
        for number in numbered(self.run.epochs, ".json"):
            if number > self._epochs_read:
                record = read_sealed(self.run.epoch(number))
                if isinstance(record.get("attempt"), int):  # a driver that heals itself claims further ones
                    self._began.setdefault(record["attempt"], record["time"])
                self._epochs_read = number
        seconds = 0.0
        last_attempts = [following.after_attempt for following in history[1:]] + [max(self._began, default=0)]
        for submission, last in zip(history, last_attempts, strict=False):
            attempts = [one for one in self._began if submission.after_attempt < one <= last]
            seconds += submission.gpus * sum(self._seconds(one, beats) for one in attempts)
        return seconds / _SECONDS_PER_HOUR

    def _seconds(self, attempt: int, beats: dict[int, Heartbeat | None]) -> float:
        if attempt in self._spent:
            return self._spent[attempt]
        beat = beats[attempt] if attempt in beats else read_heartbeat(self.run, attempt)
        seconds = max(0.0, beat.time - self._began[attempt]) if beat is not None else 0.0
        if attempt not in beats:  # no longer among the newest: it does not beat any more
            self._spent[attempt] = seconds
        return seconds


def _without_a_step(history: list[Submission]) -> tuple[int, int]:
    """How many submissions in a row before the last one brought no step, and how many of them ended by themselves."""
    fruitless = blamed = 0
    for earlier, later in zip(history[-2::-1], history[:0:-1], strict=True):
        if later.steps > earlier.steps or not later.by_controller:
            break
        fruitless += 1
        blamed += later.reason not in BLAMELESS
    return fruitless, blamed
