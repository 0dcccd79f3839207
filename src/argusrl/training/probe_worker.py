"""The actor of a probe: one on every node, the head included. It imports neither torch nor vLLM, and reserves nothing.

It belongs to one driver and ends with it: it holds nothing that the next one needs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import ray._private.worker as ray_worker

from argusrl.cluster.hang_reports import start_hang_reports
from argusrl.cluster.node_probe import NodeProbe, Reading
from argusrl.cluster.session_logs import keep_logs
from argusrl.config.secrets import SECRET_NAME

_SHORTEST_SECRET = 6  # characters; overwriting "1" or "yes" would eat ordinary text


class ProbeWorker:
    """Reads the node that it is on. Several calls at a time: one that hangs must not keep the others."""

    def __init__(self, root: Path, secret_names: Sequence[str]) -> None:
        """`secret_names` are environment variables that hold secrets, besides those that are named like some."""
        named = [*secret_names, *(name for name in os.environ if SECRET_NAME.search(name))]
        values = (os.environ.get(name, "") for name in named)
        self.secrets = [value.encode() for value in values if len(value) >= _SHORTEST_SECRET]
        self.logs = Path(ray_worker.global_worker.node.get_logs_dir_path())
        self.probe = NodeProbe(root, scratch=self.logs)

    def read(self) -> Reading:
        """What the node is like now."""
        return self.probe.read()

    def report_hangs(self, quiet_seconds: float, start_seconds: float) -> str:
        """Have HyperPod's agent watch the output of this worker; what came of it."""
        return start_hang_reports(quiet_seconds, start_seconds)

    def progress(self, line: str) -> None:
        """A line for whoever watches the output."""
        print(line, flush=True)

    def keep_logs(self, folder: Path, most_bytes: int) -> int:
        """Copy the newest of Ray's own logs of this node to a folder of the run; bytes that were copied."""
        return keep_logs(self.logs, folder, most_bytes, self.secrets)

    def leave(self) -> bool:
        """Have Ray on this node end in good order, so that its bundles move at once; False where it is not ours to end.

        Ray's daemon is the parent of its workers, and `ray start --block` that of the daemon: the pod's container ends
        with it, but not by itself where the daemon ends without an error. It waits for the daemon, which comes second.
        """
        daemon = os.getppid()
        if not _words(daemon)[0].endswith("/raylet"):
            return False
        starter = psutil.Process(daemon).ppid()
        if {"start", "--block"} <= set(_words(starter)):
            os.kill(starter, signal.SIGTERM)
        os.kill(daemon, signal.SIGTERM)
        return True


def _words(pid: int) -> list[str]:
    """The command line of a process, never empty."""
    try:
        return psutil.Process(pid).cmdline() or [""]
    except psutil.Error:
        return [""]
