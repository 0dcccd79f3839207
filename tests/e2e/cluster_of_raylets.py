"""A Ray cluster of several nodes on this machine: a head without slots, and raylets that can be lost and added.

Every node is one `ray start` in a session of its own; it is ended by the pids of its own processes, found by a mark in
their environment, so that other clusters of the machine are left alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from argusrl.cluster.local import _SYSTEM_CONFIG, COMMAND

_MARK = "ARGUSRL_TEST_NODE"
_DEADLINE_SECONDS = 60.0
_SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
_COMMON = (
    "--block",
    *("--object-store-memory", str(100 << 20)),
    *("--min-worker-port", "0"),  # nodes of one machine share its ports
    *("--max-worker-port", "0"),
    *("--dashboard-agent-listen-port", "0"),
    "--disable-usage-stats",
)


@dataclass
class Node:
    """One `ray start` and everything that it started."""

    name: str
    process: subprocess.Popen[bytes]

    @property
    def mark(self) -> dict[str, str]:
        """In the environment of everything on it; who starts something there by hand adds it."""
        return {_MARK: self.name}

    def pids(self) -> list[int]:
        mark, found = f"{_MARK}={self.name}\0".encode(), []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if mark in Path("/proc", str(process.pid), "environ").read_bytes():
                    found.append(process.pid)
        return found

    def signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def lose(self) -> None:
        """The machine is gone, from one moment to the next."""
        while self.pids():
            self.signal(signal.SIGKILL)
            self.process.poll()
            time.sleep(0.02)


@dataclass
class RayletCluster:
    """Use as a context manager; `address` is for `cluster.address`."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="arn-", dir="/tmp")))
    nodes: list[Node] = field(default_factory=list)
    address: str = ""
    head_variables: dict[str, str] = field(default_factory=dict)  # more environment of the head

    def __enter__(self) -> RayletCluster:
        try:
            self._start_head()
        except BaseException:  # a Ctrl-C, too, leaves nothing behind
            self.__exit__()
            raise
        return self

    def _start_head(self) -> None:
        head = self._start(
            "head",
            "--head",
            *("--port", "0"),
            *("--num-cpus", "0"),
            *("--include-dashboard", "false"),
            "--no-monitor",
            *("--system-config", _SYSTEM_CONFIG),
            **self.head_variables,
        )
        current = self.folder / "head" / "ray_current_cluster"
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not (current.exists() and current.read_text().strip()):
            assert head.process.poll() is None, (self.folder / "head.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.address = current.read_text().strip()

    def __exit__(self, *_: object) -> None:
        for node in reversed(self.nodes):
            node.lose()
            node.process.wait(timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, cpus: int = 1, **variables: str) -> Node:
        """Begin to start a node; it joins seconds later. `variables` are in its environment, as a pod's are."""
        name = f"node{len(self.nodes)}"
        return self._start(name, "--address", self.address, "--num-cpus", str(cpus), **variables)

    @property
    def environment(self) -> dict[str, str]:
        """What whoever joins has to have in its environment."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return kept | _SETTINGS

    def _start(self, name: str, *options: str, **variables: str) -> Node:
        with (self.folder / f"{name}.log").open("wb") as output:
            process = subprocess.Popen(
                [*COMMAND, *options, *_COMMON, "--temp-dir", str(self.folder / name)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment | {_MARK: f"{self.folder.name}-{name}"} | _HOOK | variables,
                start_new_session=True,
            )
        self.nodes.append(Node(f"{self.folder.name}-{name}", process))
        return self.nodes[-1]


_HOOK = {"RAY_START_HOOK": "argusrl.cluster.ray_start.without_client_server"}
