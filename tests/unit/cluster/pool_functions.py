"""User code for the pool's tests: everything that a function can do wrong."""

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path


def add(a, b=1):
    print("noise on standard output")
    return a + b


def process_id():
    return os.getpid()


def is_imported(name):
    return name in sys.modules


def raises(text):
    raise ValueError(text)


def leaves(code):
    sys.exit(code)


def ends(code):
    os._exit(code)


def crashes():
    ctypes.string_at(0)


def hangs():
    while True:
        time.sleep(60)


def hangs_with_child(path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    hangs()


def forks():
    os.fork()
    return "once"


def own_class():
    class Local:
        pass

    return Local()


class Own:
    pass


def own_instance():
    return Own()


def runs_a_loop():
    return asyncio.run(asyncio.sleep(0, "looped"))


def long_text(length):
    return "x" * length


async def meets(path, count):
    """Returns only when `count` calls of it are under way at the same time."""
    dots = Path(path)
    dots.touch()
    os.truncate(path, dots.stat().st_size + 1)
    while dots.stat().st_size < count:  # noqa: ASYNC110 (calls may be in other processes)
        await asyncio.sleep(0.01)
    return os.getpid()


async def sleeps():
    await asyncio.sleep(600)


async def blocks():
    hangs()


class Counter:
    def __init__(self, start=0):
        self.value = start

    def __bool__(self):
        return False

    def up(self):
        self.value += 1
        return self.value

    def process_id(self):
        return os.getpid()

    def hang(self):
        hangs()

    def wait_then_hang(self, path):
        with open(path, "w"):
            pass
        hangs()
