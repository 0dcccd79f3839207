"""The Ray head of a run on this machine: started by the supervisor, it outlives drivers and ends with the supervisor.

Nothing here imports Ray. `ray start --head --block` runs as a child in a session of its own; a driver joins with

    os.environ.update(head.environment)      # before `import ray`: it reads the token when it is imported
    ray.init(address=await_address(os.environ, deadline_seconds))

and needs no other argument (tried with Ray 2.60: `address="host:port"` finds the node of this machine by itself; the
`_node_ip_address` that Ray's own message asks for is not needed). The token of the head is random and lives in the
environment of its processes alone, so no other user of the machine can submit work to it.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from argusrl.config.sections import ClusterSection
from argusrl.errors import ClusterError

HEAD_FOLDER = "ARGUSRL_RAY_HEAD"  # environment of the driver: the folder of the head
HEAD_PROCESS = "ARGUSRL_RAY_HEAD_PID"  # and the pid of the command that started it
COMMAND = (sys.executable, "-m", "argusrl.cluster.ray_start", "start")

_MARK = "ARGUSRL_RAY_SESSION"  # environment of everything the head started, even in sessions of its own
_PREFIX, _OUTPUT = "argusrl-ray-", "head.log"  # the folder of a head, and what its command printed
_LEAVING_SECONDS = 60.0  # a younger folder may be about to be locked
_LEAST_OBJECT_STORE_BYTES = 200 << 20
_OBJECT_STORE_BYTES = 2 << 30  # an adapter at a time lies there, or all weights in full-parameter training
_SYSTEM_CONFIG = (  # a node that does not answer is declared dead after about three seconds
    '{"health_check_initial_delay_ms":1000,"health_check_period_ms":1000,'
    '"health_check_timeout_ms":1000,"health_check_failure_threshold":3,'
    '"task_events_max_num_task_in_gcs":1000}'  # by default the head remembers 100,000 calls, about 1 kB each
)
_LONGEST_ROOT = 30  # Ray puts sockets about 70 characters below it; the limit of the kernel is 107
_POLL_SECONDS = 0.05
_KILL_SECONDS = 5.0  # SIGKILL takes a moment to be done
_TAIL_CHARACTERS = 1500
_ADDRESS = re.compile(r"[\w.:\[\]-]+:\d+")
_PR_SET_PDEATHSIG = 1


def object_store_bytes() -> int:
    """Shared memory that a local Ray may use; it takes what is put there, and only for as long as it is needed."""
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:  # no Linux: Ray puts files into the temporary folder
        return _OBJECT_STORE_BYTES
    return max(_LEAST_OBJECT_STORE_BYTES, min(_OBJECT_STORE_BYTES, shared.f_bavail * shared.f_frsize // 2))


@dataclass(frozen=True, slots=True)
class LocalHead:
    """One Ray head. `start` returns at once; the address is known seconds later, see `await_address`."""

    folder: Path  # mode 0700; Ray's own temporary folder and the output of the command lie in it
    process: subprocess.Popen[bytes]
    token: str

    @classmethod
    def start(cls, section: ClusterSection) -> LocalHead:
        """Start the head with all cores of this machine, or more where the slots need more. Raises ClusterError.

        To be called by the main thread: Linux ends the head with the thread that started it.
        """
        root = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_ROOT else "/tmp")
        _remove_leavings(root)
        token = secrets.token_hex(32)
        cpus = max(os.cpu_count() or 1, math.ceil((section.slots or 1) * section.cpus_per_slot))
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            with (folder / _OUTPUT).open("wb") as output:
                fcntl.flock(output, fcntl.LOCK_EX)  # held by the command, too: says that the folder is in use
                process = subprocess.Popen(
                    [*COMMAND, *_options(folder / "ray", cpus)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_environment(folder, token),
                    start_new_session=True,
                    preexec_fn=_end_with_parent(os.getpid()),
                )
        except OSError as error:
            raise ClusterError(f"cannot start Ray on this machine: {error}", "argusrl doctor checks it") from error
        return cls(folder, process, token)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that let a driver find and join this head. They hold the token: write them nowhere."""
        return {
            **_settings(self.token),
            HEAD_FOLDER: str(self.folder),
            HEAD_PROCESS: str(self.process.pid),
        }

    def wait(self, deadline_seconds: float) -> str:
        """The address, once the head has one. Raises ClusterError when it ended or is late."""
        return await_address(self.environment, deadline_seconds)

    def alive(self) -> bool:
        """Whether the command runs. It ends by itself within a second or two when GCS or raylet died."""
        return self.process.poll() is None

    def pids(self) -> list[int]:
        """Every living process of the head: daemons, agents, workers and whatever those started."""
        session, mark = self.process.pid, f"{_MARK}={self.folder}".encode()
        entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return sorted(
            int(entry.name) for entry in entries if _session_of(entry) == session or mark in _environment_of(entry)
        )

    def stop(self, seconds: float = 5.0) -> None:
        """End every process of the head (SIGKILL for what is left after `seconds`) and remove its folder."""
        if not self._end(signal.SIGTERM, seconds):
            self._end(signal.SIGKILL, _KILL_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, number: signal.Signals, seconds: float) -> bool:
        """Send a signal to everything, what is started meanwhile included; whether nothing was left in time."""
        deadline, told = time.monotonic() + seconds, set[int]()
        while True:
            left = self.pids()
            for pid in set(left) - told:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            told.update(left)
            self.process.poll()  # bury it: a zombie keeps its number
            if not left or time.monotonic() > deadline:
                return not left
            time.sleep(_POLL_SECONDS)


def await_address(environment: Mapping[str, str], deadline_seconds: float) -> str:
    """host:port of the head that `environment` (see LocalHead.environment) tells of; waits until it is there.

    Raises ClusterError with the end of the head's output when the head has ended or is not ready in time.
    """
    try:
        folder, pid = Path(environment[HEAD_FOLDER]), int(environment[HEAD_PROCESS])
    except KeyError as missing:
        raise ClusterError(
            f"there is no local Ray head: {missing.args[0]} is not set", "start runs with argusrl train"
        ) from None
    deadline = time.monotonic() + deadline_seconds
    while True:
        running = _session_of(Path("/proc", str(pid))) is not None
        address = _read(folder / "ray" / "ray_current_cluster").strip()
        if not running:
            problem = "the local Ray head has ended"
        elif _ADDRESS.fullmatch(address):
            return address
        elif time.monotonic() > deadline:
            problem = f"the local Ray head was not ready within {deadline_seconds:.0f} s"
        else:
            time.sleep(_POLL_SECONDS)
            continue
        tail = _read(folder / _OUTPUT)[-_TAIL_CHARACTERS:].strip() or "it printed nothing"
        raise ClusterError(f"{problem}:\n{tail}", "see /dev/shm and free memory: argusrl doctor")


def _remove_leavings(root: Path) -> None:
    """Remove the folders of heads whose supervisor was killed: nobody holds their lock."""
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, locked, or removed by somebody else meanwhile
            if time.time() - folder.stat().st_mtime < _LEAVING_SECONDS:
                continue
            with (folder / _OUTPUT).open("rb") as output:
                fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _options(temporary: Path, cpus: int) -> list[str]:
    return [
        "--head",
        "--block",
        *("--port", "0"),
        *("--min-worker-port", "0", "--max-worker-port", "0"),  # two runs on one machine must not fight for ports
        *("--include-dashboard", "false"),
        *("--include-log-monitor", "false"),
        "--no-monitor",  # of the autoscaler
        "--disable-usage-stats",
        *("--num-cpus", str(cpus)),
        *("--object-store-memory", str(object_store_bytes())),
        *("--temp-dir", str(temporary)),
        *("--system-config", _SYSTEM_CONFIG),
        *("--log-style", "record"),
    ]


def _settings(token: str) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _environment(folder: Path, token: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {
        **inherited,
        **_settings(token),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # SIGTERM means now: the journal holds what counts
        "RAY_START_HOOK": "argusrl.cluster.ray_start.without_client_server",
        _MARK: str(folder),
    }


def _end_with_parent(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

    return prepare


def _session_of(process: Path) -> int | None:
    """The session of a process by its folder in /proc; None when it is gone or waits to be buried."""
    state, _, _, session = [*_read(process / "stat").rpartition(")")[2].split()[:4], *[""] * 4][:4]
    return None if state in ("", "Z", "X") else int(session)


def _environment_of(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # gone, or another user's
        return b""


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
