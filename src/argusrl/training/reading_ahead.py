"""Prompts of the next rollout are read, decoded and checked while ranks train."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from argusrl.data.source import PromptSource
from argusrl.types import Prompt


class ReadingAhead:
    """A prompt source that one thread reads from, so that neither event loop nor engines wait for images."""

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reading-ahead")
        self._ahead: dict[int, Future[Prompt]] = {}
        self._before: dict[int, Future[Prompt]] = {}  # one step ahead this is asked for before those are taken

    def begin(self, indices: Iterable[int]) -> None:
        """Read these next. What was asked for before the last call and never taken is forgotten."""
        for future in self._before.values():
            future.cancel()
        self._before, self._ahead = self._ahead, {index: self._submit(index) for index in indices}

    async def take(self, index: int) -> Prompt:
        """Prompt `index`, once: asked for again it is read again. Raises what the source raises."""
        future = self._before.pop(index, None) or self._ahead.pop(index, None) or self._submit(index)
        return await asyncio.wrap_future(future)

    def _submit(self, index: int) -> Future[Prompt]:
        return self._thread.submit(self._source.__getitem__, index)
