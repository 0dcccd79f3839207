"""What was read ahead is there at once; what was not, or failed, behaves as if nothing had been read ahead."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from argusrl.errors import DataError
from argusrl.training.reading_ahead import ReadingAhead
from argusrl.types import Prompt


class Source:
    """Reads nothing while `gate` is closed. Row 9 is unusable."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Prompt:
        assert self.gate.wait(10)
        self.read.append(index)
        if index == 9:
            raise DataError("row 9 has no image")
        return Prompt(id=str(index))


def ahead() -> tuple[ReadingAhead, Any]:
    source: Any = Source()
    return ReadingAhead(source), source


def test_each_row_is_read_once_and_before_it_is_asked_for() -> None:
    async def work() -> None:
        reading, source = ahead()
        reading.begin([3, 1])
        source.gate.set()
        assert [(await reading.take(index)).id for index in (1, 3)] == ["1", "3"]
        assert source.read == [3, 1]
        assert (await reading.take(3)).id == "3"  # another attempt reads for itself
        assert source.read == [3, 1, 3]

    asyncio.run(work())


def test_the_loop_goes_on_while_a_row_is_read() -> None:
    async def work() -> None:
        reading, source = ahead()
        task = asyncio.create_task(reading.take(2))
        await asyncio.sleep(0.02)
        assert not task.done()
        source.gate.set()
        assert (await task).id == "2"

    asyncio.run(work())


def test_an_unusable_row_is_told_where_it_is_played() -> None:
    async def work() -> None:
        reading, source = ahead()
        source.gate.set()
        reading.begin([9, 4])
        assert (await reading.take(4)).id == "4"
        with pytest.raises(DataError, match="row 9"):
            await reading.take(9)

    asyncio.run(work())


def test_what_is_not_taken_outlives_one_more_step_and_no_other() -> None:
    async def work() -> None:
        reading, source = ahead()
        reading.begin([0, 1, 2, 3])  # the first is being read, the others wait
        reading.begin([5, 6])
        reading.begin([7])
        source.gate.set()
        assert [(await reading.take(index)).id for index in (5, 7, 6)] == ["5", "7", "6"]
        assert source.read == [0, 5, 6, 7]

    asyncio.run(work())
