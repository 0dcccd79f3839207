"""What every actor process does first: its log, and its end when no driver needs it any more."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LEASE_CHECKS = 20  # per lease
_NICENESS = 10


def start_logging(path: Path) -> None:
    """Send this process's standard output, error and log records to a file of the attempt."""
    logging.raiseExceptions = False  # a full disk is noticed where it matters
    with suppress(OSError):  # the run folder is away: Ray keeps what is said; nothing may take the folder's place
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    for noisy in ("httpx", "urllib3", "filelock", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


@contextmanager
def many_imports() -> Iterator[None]:
    """Around the imports of torch and what builds on it: a fifth faster, and lighter from then on.

    They make a million objects that live as long as the process: looking for garbage among them again and again is
    what takes the time, so it is not done meanwhile, nor are they looked at later.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_meanwhile(module: str) -> None:
    """Import something that is not waited for yet, in a thread that gives way: where cores are few, others are.

    The niceness of a thread ends with it; that of a process could not be taken back.
    """
    faults: list[Exception] = []

    def work() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            importlib.import_module(module)
        except Exception as error:
            faults.append(error)

    thread = threading.Thread(target=work, name="imports")
    with many_imports():
        thread.start()
        thread.join()
    if faults:
        raise faults[0]


class Lease:
    """Ends this process when no driver has called for `seconds`: a detached actor must not hold a GPU for ever.

    The driver's watch calls every worker every second, so a driver that lives renews all leases.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.renewed = time.monotonic()
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def renew(self) -> None:
        self.renewed = time.monotonic()

    def _watch(self) -> None:
        while True:
            time.sleep(self.seconds / _LEASE_CHECKS)
            if time.monotonic() - self.renewed > self.seconds:
                logging.error("no driver has called for %.0f s (recovery.orphan_seconds): it ends", self.seconds)
                os._exit(0)
