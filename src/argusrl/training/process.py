"""What every actor process does first: its log, and its end when no driver needs it any more."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

_LEASE_CHECKS = 20  # per lease


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
