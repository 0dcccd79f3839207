"""Every wait for a worker has a deadline, and every broken worker is a typed fault."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from textwrap import shorten
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError

from argusrl.errors import ArgusError, DeadlineError, SampleError, WorkerError, WorkerLost

T = TypeVar("T")

SETTLE_SECONDS = 5.0
_CAUSE_CHARACTERS = 160  # of Ray's own explanation


async def call(reference: Awaitable[T], deadline_seconds: float, method: str, member: str) -> T:
    """Await one remote call. Raises the worker's own ArgusError, WorkerLost if it died, DeadlineError if it hangs.

    `method` and `member` ("rank 1") are for the messages; every fault carries its member.
    """
    try:
        async with asyncio.timeout(deadline_seconds):  # wait_for of Python 3.11 swallows some cancellations
            return await reference
    except RayError as error:  # first: what a worker raised may be a TimeoutError as well
        fault, cause = translate(error, method, member), error
    except TimeoutError as error:
        text = f"{member} did not answer within {deadline_seconds:.0f} s ({method})"
        fault, cause = DeadlineError(text), error
    raise fault.of(member) from cause


async def call_all(
    references: Iterable[Awaitable[T]], deadline_seconds: float, method: str, members: Sequence[str]
) -> list[T]:
    """Await the same call on all workers. After the first fault the others get SETTLE_SECONDS to end, too.

    Raises the fault that explains the others: one dead rank makes its neighbours' collectives fail.
    """
    tasks = [
        asyncio.ensure_future(call(reference, deadline_seconds, method, member))
        for reference, member in zip(references, members, strict=True)
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.done() and task.exception() for task in tasks):
            await asyncio.wait(tasks, timeout=SETTLE_SECONDS)
    finally:
        for task in tasks:
            task.cancel()
    faults = [fault for task in tasks if task.done() and not task.cancelled() and (fault := task.exception())]
    if faults:
        raise min(faults, key=_rank_of)
    return [task.result() for task in tasks]


def _rank_of(fault: BaseException) -> int:
    """The lower, the more it explains: a death, then samples that are named, then the rest."""
    if isinstance(fault, WorkerLost):
        return 0
    return 1 if isinstance(fault, SampleError) and fault.keys else 2


async def settle(
    references: Iterable[Awaitable[T]], deadline_seconds: float, method: str, members: Sequence[str]
) -> list[T | ArgusError]:
    """Await the same call on all workers; what each returned or which fault it has."""

    async def one(reference: Awaitable[T], member: str) -> T | ArgusError:
        try:
            return await call(reference, deadline_seconds, method, member)
        except ArgusError as fault:
            return fault

    return list(await asyncio.gather(*(one(*pair) for pair in zip(references, members, strict=True))))


def translate(error: RayError, method: str, member: str) -> ArgusError:
    """The fault behind Ray's exception: a worker's own error stays what it is."""
    if isinstance(error, RayTaskError):
        cause: Any = error.cause
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, ArgusError):
            return cause
        logging.getLogger(__name__).error("%s of %s failed:\n%s", method, member, error)
        text = f"{member} failed in {method}: {type(cause).__name__}: {cause}"
        return WorkerError(text, "attempts/*/logs holds the traceback")
    if isinstance(error, RayActorError):
        cause = shorten(str(error).splitlines()[0], _CAUSE_CHARACTERS)
        return WorkerLost(f"{member} died ({method}): {cause}").of(member)
    return WorkerError(f"{member} failed in {method}: {error}")
