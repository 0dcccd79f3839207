"""CPU seconds and memory of all processes of one command, found by a mark in their environment."""

from __future__ import annotations

import bisect
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MARK = "ARGUSRL_BENCHMARK_MARK"
CPU_PERIOD_SECONDS = 0.05
LOOK_PERIOD_SECONDS = 0.25  # for processes that are new
MEMORY_PERIOD_SECONDS = 2.0  # reading it stops a process for some milliseconds
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Process:
    """What is known of one process."""

    pid: int
    command: str
    times: list[float] = field(default_factory=list)  # time.time() of each reading
    cpu_seconds: list[float] = field(default_factory=list)  # user and system, all threads
    peak_pss_bytes: int = 0
    peak_rss_bytes: int = 0  # by the kernel's own high-water mark

    def used_until(self, moment: float) -> float:
        """CPU seconds used until then, interpolated between readings."""
        after = bisect.bisect_left(self.times, moment)
        if after == 0:
            return self.cpu_seconds[0] if self.times and self.times[0] == moment else 0.0
        if after == len(self.times):
            return self.cpu_seconds[-1]
        before = after - 1
        share = (moment - self.times[before]) / (self.times[after] - self.times[before])
        return self.cpu_seconds[before] + share * (self.cpu_seconds[after] - self.cpu_seconds[before])


class ProcessTree:
    """Watches a command from its start until `stop`. Its descendants keep the mark, wherever they were adopted."""

    def __init__(self) -> None:
        self.processes: dict[int, Process] = {}
        self.peak_pss_bytes = 0  # of all together
        self._value = secrets.token_hex(8)
        self._others: set[int] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, stdout: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the command with standard output to standard error (or to `stdout`), and watch it."""
        marked = {**os.environ, **(environment or {}), MARK: self._value}
        process = subprocess.Popen(command, env=marked, stdout=sys.stderr if stdout is None else stdout)
        self._thread.start()
        return process

    def stop(self) -> None:
        """Read no more."""
        self._stopped.set()
        self._thread.join()

    def between(self, began: float, ended: float, title: str = "") -> float:
        """CPU seconds between two moments of time.time(), of the processes with `title` in their command line."""
        return sum(
            process.used_until(ended) - process.used_until(began)
            for process in self.processes.values()
            if title in process.command
        )

    def peak_pss_of(self, title: str) -> int:
        """Largest PSS in bytes of one process with `title` in its command line."""
        return max((one.peak_pss_bytes for one in self.processes.values() if title in one.command), default=0)

    def _watch(self) -> None:
        look_due = memory_due = 0.0
        while not self._stopped.is_set():
            now = time.monotonic()
            if now >= look_due:
                self._look_for_more()
                look_due = now + LOOK_PERIOD_SECONDS
            if now >= memory_due:
                self._read_memory()
                memory_due = now + MEMORY_PERIOD_SECONDS
            for process in list(self.processes.values()):
                self._read_cpu(process)
            self._stopped.wait(CPU_PERIOD_SECONDS)

    def _look_for_more(self) -> None:
        """Processes that were not there the last time. A command line may change until a process works: read again."""
        mark = f"{MARK}={self._value}".encode()
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._others &= present
        for pid in present - self._others:
            try:
                if pid not in self.processes and mark not in Path(f"/proc/{pid}/environ").read_bytes():
                    self._others.add(pid)
                    continue
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            known = self.processes.setdefault(pid, Process(pid, command))
            known.command = command or known.command

    def _read_cpu(self, process: Process) -> None:
        try:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
        except OSError:  # it ended: what it had used stays
            return
        user, system = stat.rpartition(")")[2].split()[11:13]
        process.times.append(time.time())
        process.cpu_seconds.append((int(user) + int(system)) / _TICKS_PER_SECOND)

    def _read_memory(self) -> None:
        together = 0
        for process in self.processes.values():
            try:
                rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                continue
            pss, rss = _kibibytes(rollup, "Pss:") * 1024, _kibibytes(status, "VmHWM:") * 1024
            process.peak_pss_bytes = max(process.peak_pss_bytes, pss)
            process.peak_rss_bytes = max(process.peak_rss_bytes, rss)
            together += pss
        self.peak_pss_bytes = max(self.peak_pss_bytes, together)


def _kibibytes(text: str, name: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(name)), 0)
