"""`argusrl drain`: what a pod's preStop hook runs, so that its node is left in good order before the pod goes.

Kubernetes waits for the hook before it ends the pod. The hook must never wait for long where nobody answers: no run,
no driver, storage that hangs. So everything here has a deadline, and nothing heavy is imported.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argusrl.cluster.names import POD_VARIABLE
from argusrl.errors import DeadlineError

if TYPE_CHECKING:
    from argusrl.journal.attempts import Heartbeat
    from argusrl.storage.layout import RunFolder

_MARGIN_SECONDS = 2.0  # for the driver to see the wish, and for us to see the answer
_POLL_SECONDS = 0.2
_SILENT_SECONDS = 15.0  # three heartbeats
_FRESH_SECONDS = 60.0  # an older heartbeat says nothing of the processes of now
_DRIVER, _TRAIN = "argusrl.training.driver", "train"
_LATE = DeadlineError.exit_code
_ENDS = ("complete", "interrupted")


def register(app: typer.Typer) -> None:
    @app.command("drain")
    def drain(
        wait: Annotated[bool, typer.Option("--wait", help="Wait until the node is empty, at most 30 s.")] = False,
        reason: Annotated[str, typer.Option("--reason", help="Why, for events and logs.")] = "the pod ends",
        pod: Annotated[str | None, typer.Option("--pod", help="Pod to leave; default is POD_NAME.")] = None,
        run: Annotated[Path | None, typer.Option("--run", help="Run folder; default is ARGUSRL_RUN_FOLDER.")] = None,
    ) -> None:
        """Leave a node in good order before its pod ends: a pod's preStop hook runs this.

        Where the run is driven from this very pod, its driver seals everything and ends; the same command resumes.

        Exit codes: 0 done, or nothing to do; 11 nobody answered in time, or the run folder cannot be used.
        """
        raise typer.Exit(_leave(wait=wait, reason=reason, pod=pod, run=run))


def _leave(*, wait: bool, reason: str, pod: str | None, run: Path | None) -> int:
    from argusrl.cli.output import say
    from argusrl.cluster.names import NODE_VARIABLE, RUN_FOLDER_VARIABLE, SUBMISSION_VARIABLE
    from argusrl.journal.drains import DRAIN_SECONDS

    folder = run or Path(os.environ.get(RUN_FOLDER_VARIABLE, ""))
    asked = _Asked(
        folder=folder,
        pod=pod or os.environ.get(POD_VARIABLE, ""),
        node=os.environ.get(NODE_VARIABLE, "") if pod is None else "",
        reason=reason,
        by="hook" if pod is None else "person",
        submission=int(os.environ.get(SUBMISSION_VARIABLE) or 0) if pod is None else 0,
        wait_seconds=DRAIN_SECONDS if wait else 0.0,
    )
    if folder == Path(""):
        say(f"nothing to leave: {RUN_FOLDER_VARIABLE} is not set, and there is no --run")
        return 0
    if not asked.pod:
        say(f"nothing to leave: {POD_VARIABLE} is not set, and there is no --pod")
        return 0
    thread = threading.Thread(target=asked.work, daemon=True)  # storage that hangs cannot be waited for otherwise
    thread.start()
    thread.join(asked.wait_seconds + _MARGIN_SECONDS + 1.0)
    if asked.code is None:
        asked.text = f"{folder} does not answer: {asked.pod} goes as it is"
    say(asked.text)
    return _LATE if asked.code is None else asked.code


@dataclass(slots=True)
class _Asked:
    """One wish, and what became of it; `code` is None until that is known."""

    folder: Path
    pod: str
    node: str
    reason: str
    by: str
    submission: int  # that the pod is of; 0 is not known
    wait_seconds: float
    text: str = ""
    code: int | None = None

    def work(self) -> None:
        """Ask, and wait for the answer where that is wanted."""
        from argusrl.errors import ArgusError

        try:
            code, text = self._ask()
        except (ArgusError, OSError) as error:
            code, text = _LATE, f"{getattr(error, 'message', error)}: {self.pod} goes as it is"
        self.text, self.code = text, code

    def _ask(self) -> tuple[int, str]:
        from argusrl.errors import FencedError
        from argusrl.journal.attempts import newest_attempt, read_verdict
        from argusrl.journal.drains import Drain, ask_for_drain
        from argusrl.journal.submissions import require_newest
        from argusrl.storage.layout import RunFolder

        run = RunFolder(self.folder.resolve())
        if not run.config.exists():
            return 0, f"nothing to leave: {run.path} is not a run"
        attempt = newest_attempt(run)
        if attempt == 0 or read_verdict(run, attempt) is not None:
            return 0, f"nothing to leave: no driver of {run.path} is under way"
        if self.submission:
            try:
                require_newest(run, self.submission)
            except FencedError as fenced:  # the driver that could answer is dead, or ends now
                return 0, f"nothing to leave: {fenced.message}"
        if self.by == "hook" and (stopped := self._stop_driver(run, attempt)):
            return stopped
        ask_for_drain(run, Drain(pod=self.pod, node=self.node, reason=self.reason, asked_by=self.by, time=time.time()))
        if not self.wait_seconds:
            return 0, f"asked that {self.pod} be left"
        return self._wait(run)

    def _wait(self, run: RunFolder) -> tuple[int, str]:
        """For the answer, or the end of the run. Storage that is away for a moment is waited for, too."""
        from argusrl.errors import StorageError
        from argusrl.journal.attempts import newest_attempt, read_heartbeat, read_verdict
        from argusrl.journal.drains import read_drained
        from argusrl.storage.visibility import patience_seconds

        late = patience_seconds(run.path)  # so old a heartbeat may look here
        deadline = time.monotonic() + self.wait_seconds + _MARGIN_SECONDS
        beat, beat_at = None, time.monotonic()
        while time.monotonic() < deadline:
            with suppress(StorageError):
                if (now := read_heartbeat(run, newest_attempt(run))) != beat:
                    beat, beat_at = now, time.monotonic()
                elif time.monotonic() - beat_at > max(_SILENT_SECONDS, late):
                    return _LATE, f"{self.pod}: the driver is silent; it goes as it is"
                answer = read_drained(run, self.pod)
                if answer is not None:
                    handed = f", {answer.handed_over} unfinished trajectories go on elsewhere"
                    text = f"{self.pod}: {answer.outcome} after {answer.seconds:.1f} s"
                    return 0, text + (handed if answer.handed_over else "")
                verdict = read_verdict(run, newest_attempt(run))
                if verdict is not None and verdict.outcome in _ENDS:  # after another one a new driver may begin
                    return 0, f"{self.pod}: the run has ended: {verdict.outcome}"
            time.sleep(_POLL_SECONDS)
        return _LATE, f"{self.pod}: no answer within {self.wait_seconds + _MARGIN_SECONDS:.0f} s; it goes as it is"

    def _stop_driver(self, run: RunFolder, attempt: int) -> tuple[int, str] | None:
        """Where the driver is a process of this pod: ask it to stop, and wait until it has. None where it is not."""
        from argusrl.journal.attempts import read_heartbeat, read_verdict

        heartbeat = read_heartbeat(run, attempt)
        target = None if heartbeat is None else _supervisor_of(heartbeat, self.pod)
        if target is None:
            return None
        os.kill(target, signal.SIGTERM)
        if not self.wait_seconds:
            return 0, "asked the driver to seal everything and to stop"
        began = time.monotonic()
        while read_verdict(run, attempt) is None:
            if time.monotonic() - began > self.wait_seconds:
                return _LATE, f"the driver has not stopped within {self.wait_seconds:.0f} s"
            time.sleep(_POLL_SECONDS)
        return 0, f"the driver sealed everything and stopped after {time.monotonic() - began:.1f} s"


def _supervisor_of(heartbeat: Heartbeat, pod: str) -> int | None:
    """The process that a signal must go to, if the driver that beats is one of this pod."""
    if heartbeat.host != socket.gethostname() or abs(time.time() - heartbeat.time) > _FRESH_SECONDS:
        return None
    if _DRIVER not in _words(heartbeat.pid) or f"{POD_VARIABLE}={pod}" not in _words(heartbeat.pid, "environ"):
        return None
    try:
        parent = int(Path("/proc", str(heartbeat.pid), "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return None
    return parent if _TRAIN in _words(parent) else heartbeat.pid


def _words(pid: int, file: str = "cmdline") -> list[str]:
    try:
        return Path("/proc", str(pid), file).read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
