"""What the syscall sweep disturbs: two steps of a small run. `python sweep_program.py RUN_FOLDER [SHORT_WRITE]`.

Says on its standard output, a line of JSON each, what it was told is durable. With SHORT_WRITE = n, os.write number n
(from 1) takes half of its bytes, as a kernel may; with -n the disk is full afterwards.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

from argusrl.errors import ArgusError
from argusrl.storage.layout import RunFolder
from faults.small_driver import SmallDriver


def say(*words: Any) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def shorten_write(number: int) -> None:
    """From now on os.write number abs(number) into a file takes half; a negative one has all later ones fail."""
    calls, write = 0, os.write

    def short(descriptor: int, data: Any) -> int:
        nonlocal calls
        calls += descriptor != 1
        if descriptor != 1 and calls == abs(number):
            return write(descriptor, bytes(data)[: max(1, len(data) // 2)])
        if descriptor != 1 and number < 0 and calls > -number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    os.write = short


def main(arguments: list[str]) -> int:
    if len(arguments) > 1:
        shorten_write(int(arguments[1]))
    try:
        SmallDriver(RunFolder(Path(arguments[0])), say).drive()
    except ArgusError as error:
        print(f"{type(error).__name__}: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
