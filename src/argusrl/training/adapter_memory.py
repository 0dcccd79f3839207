"""The adapter version that lies in Ray's object store, as the driver knows it.

The driver owns the object, so that it outlives who made it, and never looks at it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from argusrl.errors import ArgusError
from argusrl.types import AdapterRef


class AdapterMemory:
    """Holds one version. What it does not hold is read from storage, once for all engines, and counted."""

    def __init__(self) -> None:
        self._held: tuple[AdapterRef, Any] | None = None
        self._reads = 0
        self._reading = asyncio.Lock()

    def hold(self, reference: AdapterRef, files: Any) -> None:
        """A version that was handed over in memory."""
        self._held = (reference, files)

    def forget(self) -> None:
        """Let Ray free the object."""
        self._held = None

    async def files(self, reference: AdapterRef, read: Callable[[], Awaitable[Any]]) -> Any:
        """Where the version lies; `read` has it read from its folder if it is not held."""
        async with self._reading:
            if self._held is None or self._held[0] != reference:
                self._reads += 1
                self._held = (reference, await read())
            return self._held[1]

    @contextmanager
    def trusted(self) -> Iterator[None]:
        """After a fault of the body the folder is read anew: the object may have been lost with its node."""
        try:
            yield
        except ArgusError:
            self.forget()
            raise

    def take_reads(self) -> int:
        """How often storage was read since the last call."""
        reads, self._reads = self._reads, 0
        return reads
