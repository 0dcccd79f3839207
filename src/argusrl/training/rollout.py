"""The rollout of one step: which trajectories are missing, who plays them, when too many fail."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from argusrl.config.sections import RolloutSection
from argusrl.errors import WorkerError
from argusrl.journal.episodes import SealedStep
from argusrl.journal.quarantine import QUARANTINED
from argusrl.rollout.player import PlaySettings
from argusrl.training.episode_worker import GroupOrder
from argusrl.training.fleet import EpisodeFleet
from argusrl.types import EpisodeFailure, TrajectoryRef

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """All trajectories of a step, in an order that does not depend on timing."""

    trajectories: tuple[TrajectoryRef, ...]  # by position of the prompt in the step, then by sample
    failures: tuple[EpisodeFailure, ...]
    sealed: tuple[SealedStep, ...]
    adopted: int  # taken over from interrupted attempts
    sampled_tokens: int  # response tokens of the others
    play_seconds: float = field(default=0.0, compare=False)  # from the first episode's begin to the last one's end
    seal_seconds: float = field(default=0.0, compare=False)  # until everything was durable


@dataclass(slots=True)
class Rollout:
    """Plays `group_size` samples of each prompt, minus what the journal already holds."""

    episodes: EpisodeFleet
    engines: int
    group_size: int
    section: RolloutSection
    settings: PlaySettings
    say: Callable[[str], None]
    half_way: Callable[[], None] = lambda: None  # hears when half of the groups are there
    quarantined: Sequence[EpisodeFailure] = ()  # what is left out of this step
    outcomes: dict[tuple[int, int], TrajectoryRef | EpisodeFailure] = field(default_factory=dict)
    _playing: asyncio.Task[None] | None = None
    _wanted: Sequence[tuple[int, int]] = ()
    _taken_over: set[tuple[int, int]] = field(default_factory=set)
    _play_seconds: float = 0.0

    def begin(self, prompts: Sequence[int], prompt_ids: dict[str, int], adopted: Sequence[TrajectoryRef]) -> None:
        """Start to play. `prompts` are rows of the prompt source; `prompt_ids` maps the ids of adopted trajectories."""
        self._playing = asyncio.create_task(self._play(prompts, prompt_ids, adopted))
        self._playing.add_done_callback(lambda task: task.cancelled() or task.exception())  # `end` may never ask

    async def end(self) -> RolloutResult:
        """Wait until everything is played, and make it durable. Raises what playing raised."""
        assert self._playing is not None
        await self._playing
        return await self._seal()

    def abandon(self) -> None:
        """Nobody waits for it any more. What finished is in the journal."""
        if self._playing is not None:
            self._playing.cancel()

    async def _play(self, prompts: Sequence[int], prompt_ids: dict[str, int], adopted: Sequence[TrajectoryRef]) -> None:
        began = time.monotonic()
        self._wanted = wanted = [(index, sample) for index in prompts for sample in range(self.group_size)]
        asked = frozenset(wanted)
        for reference in adopted:
            place = (prompt_ids.get(reference.key.prompt_id, -1), reference.key.sample)
            if place in asked:  # not where the data changed on disk between two attempts
                self.outcomes[place] = reference
        self._taken_over = set(self.outcomes)
        for failure in self.quarantined:
            place = (prompt_ids.get(failure.key.prompt_id, -1), failure.key.sample)
            if place in asked:
                self.outcomes[place] = failure
        await self._play_missing(wanted, attempt=0)
        await self._wait_while_failing(wanted)
        self._play_seconds = time.monotonic() - began

    async def _seal(self) -> RolloutResult:
        sealing = time.monotonic()
        sealed = await self.episodes.seal()
        seal_seconds = time.monotonic() - sealing
        ordered = [self.outcomes[place] for place in self._wanted]
        return RolloutResult(
            trajectories=tuple(item for item in ordered if isinstance(item, TrajectoryRef)),
            failures=tuple(item for item in ordered if isinstance(item, EpisodeFailure)),
            sealed=tuple(sealed),
            play_seconds=self._play_seconds,
            seal_seconds=seal_seconds,
            adopted=len(self._taken_over),
            sampled_tokens=sum(
                item.response_tokens
                for place in self._wanted
                if isinstance(item := self.outcomes[place], TrajectoryRef) and place not in self._taken_over
            ),
        )

    async def _play_missing(self, wanted: Sequence[tuple[int, int]], attempt: int) -> None:
        done = 0
        missing: dict[int, list[int]] = {}
        for index, sample in wanted:
            if not _is_final(self.outcomes.get((index, sample))):
                missing.setdefault(index, []).append(sample)

        async def one(number: int, index: int, samples: list[int]) -> None:
            nonlocal done
            order = GroupOrder(index=index, samples=tuple(samples), engine=number % self.engines)
            results = await self.episodes.play(order, self.settings, attempt)
            for sample, result in zip(samples, results, strict=True):
                self.outcomes[index, sample] = result
            done += 1
            if done == (len(missing) + 1) // 2:
                self.half_way()

        # All samples of a group go to one engine, so that its caches hold prompt and image.
        orders = [one(number, index, samples) for number, (index, samples) in enumerate(missing.items())]
        await together(orders)

    async def _wait_while_failing(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Pause while more than max_failed_share of the step fails; keep what is finished; say which service it is."""
        began = time.monotonic()
        attempt = 0
        while True:
            failures = [
                item for item in self.outcomes.values() if isinstance(item, EpisodeFailure) and not _is_final(item)
            ]
            if len(failures) <= self.section.max_failed_share * len(wanted):
                return
            reason = describe_failures(failures, len(wanted))
            limit = self.section.pause_limit_seconds
            if time.monotonic() - began > limit:
                raise WorkerError(
                    f"{reason}; paused for more than rollout.pause_limit_seconds = {limit:.0f}",
                    "everything finished is in the journal: mend the cause and run the same command to go on",
                )
            self.say(f"Paused: {reason}. Trying again in {self.section.pause_probe_seconds:.0f} s")
            await asyncio.sleep(self.section.pause_probe_seconds)
            attempt += 1
            await self._play_missing(wanted, attempt)


def _is_final(outcome: TrajectoryRef | EpisodeFailure | None) -> bool:
    """Not to be played again: it finished, or it was left out because it ended the step."""
    return isinstance(outcome, TrajectoryRef) or (outcome is not None and outcome.kind == QUARANTINED)


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all. The first fault is raised; it cancels the others: none may go on beside what is done about it."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as faults:
        raise first_of(faults) from None
    return [task.result() for task in tasks]


async def both(first: Coroutine[Any, Any, T], second: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """`together` for two of different kinds; the first one starts first."""
    one, other = await together(cast("list[Coroutine[Any, Any, Any]]", [first, second]))
    return one, other


def first_of(error: BaseException) -> BaseException:
    """The first exception of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_failures(failures: Sequence[EpisodeFailure], total: int) -> str:
    """Which service or exception, e.g. "40 of 64 episodes failed: reward http (38): connection refused"."""
    causes = Counter((failure.kind, failure.source, failure.message.partition("\n")[0]) for failure in failures)
    (kind, source, message), count = causes.most_common(1)[0]
    more = f" and {len(causes) - 1} other reasons" if len(causes) > 1 else ""
    return f"{len(failures)} of {total} episodes failed: {kind} {source} ({count}): {message}{more}"
