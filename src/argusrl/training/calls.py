"""Every wait for a worker has a deadline, and every broken worker is a typed fault."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError

from argusrl.errors import ArgusError, DeadlineError, WorkerError

T = TypeVar("T")


async def call(reference: Awaitable[T], deadline_seconds: float, what: str) -> T:
    """Await one remote call. Raises the worker's own ArgusError, WorkerError if it died, DeadlineError if it hangs."""
    try:
        return await asyncio.wait_for(_resolved(reference), deadline_seconds)
    except RayError as error:  # first: what a worker raised may be a TimeoutError as well
        raise translate(error, what) from error
    except TimeoutError as error:
        raise DeadlineError(f"{what} did not answer within {deadline_seconds:.0f} s") from error


async def _resolved(reference: Awaitable[T]) -> T:
    return await reference


async def call_all(references: Iterable[Awaitable[T]], deadline_seconds: float, what: str) -> list[T]:
    """Await the same call on all workers; the first fault wins."""
    return list(
        await asyncio.gather(
            *(call(reference, deadline_seconds, f"{what} {index}") for index, reference in enumerate(references))
        )
    )


def translate(error: RayError, what: str) -> ArgusError:
    """The fault behind Ray's exception: a worker's own error stays what it is."""
    if isinstance(error, RayTaskError):
        cause: Any = error.cause
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, ArgusError):
            return cause
        logging.getLogger(__name__).error("%s failed:\n%s", what, error)
        return WorkerError(f"{what} failed: {type(cause).__name__}: {cause}", "attempts/*/logs holds the traceback")
    if isinstance(error, RayActorError):
        return WorkerError(f"{what} died: {str(error).splitlines()[0]}")
    return WorkerError(f"{what} failed: {error}")
