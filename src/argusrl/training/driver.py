"""One attempt of a run: `python -m argusrl.training.driver RUN_FOLDER ATTEMPT`, started by the supervisor.

Claims the next epoch, checks the input, starts the workers, trains, and leaves a verdict.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from argusrl.cluster.local import HEAD_FOLDER
from argusrl.cluster.names import SUBMISSION_VARIABLE
from argusrl.config.load import digest, read_resolved
from argusrl.config.secrets import resolve_environment
from argusrl.config.sections import Config
from argusrl.data.order import PromptOrder
from argusrl.errors import ArgusError, StorageError
from argusrl.journal.attempts import Heartbeat, Verdict, read_verdict, write_heartbeat, write_verdict
from argusrl.journal.commits import CommitChain
from argusrl.journal.epochs import claim_epoch, newest_epoch
from argusrl.journal.retention import sweep_temporaries
from argusrl.journal.submissions import require_newest
from argusrl.observe.display import Display, make_display
from argusrl.observe.events import EventLog
from argusrl.observe.phases import PhaseLog
from argusrl.observe.prometheus import Telemetry
from argusrl.observe.redact import Redactor
from argusrl.observe.sinks import open_sinks, require_sinks
from argusrl.recovery.supervisor import count_commits
from argusrl.storage.layout import RunFolder
from argusrl.storage.probe import probe_root
from argusrl.storage.publish import replace_file, storage_error
from argusrl.storage.s3 import require_boto3
from argusrl.training.checks import CheckedInput, InputCheck, decode_checked, encode_checked
from argusrl.training.evaluation_file import history, read_evaluations

if TYPE_CHECKING:
    from argusrl.journal.epochs import Epoch
    from argusrl.training.bring_up import Hiring
    from argusrl.training.fleet import Workers
    from argusrl.training.run import Run

_HEARTBEAT_SECONDS = 5.0


def main(arguments: list[str]) -> int:
    """Run one attempt; the exit code."""
    folder, attempt, debug = RunFolder(Path(arguments[0])), int(arguments[1]), "--debug" in arguments
    logs = folder.attempt(attempt) / "logs"
    logging.raiseExceptions = False  # a full disk is noticed where it matters
    try:
        logs.mkdir(exist_ok=True)
        logging.basicConfig(filename=logs / "driver.log", level=logging.INFO, force=True)
    except OSError as error:  # the run folder went away a moment ago: the supervisor waits for it
        print(storage_error(error, logs).message, file=sys.stderr, flush=True)
        return 1
    driver = _Driver(folder, attempt, logs, restarted="--restarted" in arguments)
    try:
        driver.prepare()
        verdict = asyncio.run(driver.run())
    except BaseException as error:
        verdict = _verdict_of(error, folder, logs, debug)
    if driver.check is not None:
        driver.check.stop()
    with suppress(StorageError):  # the supervisor writes one where it can
        write_verdict(folder, attempt, verdict)
    if verdict.exit_code == 0:
        driver.display.stop(closing_lines(folder, verdict))
    else:
        driver.display.stop()
        print(failure_text(folder, verdict), file=sys.stderr, flush=True)
    driver.heartbeat.stop()
    return verdict.exit_code


def _verdict_of(error: BaseException, folder: RunFolder, logs: Path, debug: bool) -> Verdict:
    """Turn what ended the attempt into a verdict; the traceback goes to the log, people get one clear message."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    logging.error("".join(traceback.format_exception(error)))
    if debug:
        traceback.print_exception(error)
    known = isinstance(error, ArgusError)
    code = error.exit_code if isinstance(error, ArgusError) else 1
    text = str(error) if known else f"{type(error).__name__}: {error} (traceback in {logs / 'driver.log'})"
    return Verdict(
        outcome="interrupted" if code == 75 else "failed",
        exit_code=code,
        reason=Redactor().text(text),
        error=type(error).__name__,
        step=count_commits(folder),
        time=time.time(),
    )


@dataclass(slots=True)
class _Driver:
    folder: RunFolder
    attempt: int
    logs: Path
    config: Config | None = None
    display: Display = None  # type: ignore[assignment]
    heartbeat: _HeartbeatThread = None  # type: ignore[assignment]
    restarted: bool = False  # takes the place of one that was lost
    check: InputCheck | None = None
    checked: CheckedInput | None = None

    def __post_init__(self) -> None:
        self.display = make_display("none")
        self.heartbeat = _HeartbeatThread(self.folder, self.attempt)

    def prepare(self) -> None:
        """Config, storage, and the check of model and data, which may go on when this returns.

        Raises the user's mistakes.
        """
        own = self.folder.attempt(self.attempt) / "config.yaml"
        config = read_resolved(own if own.exists() else self.folder.config)
        self.config = config
        require_sinks(config)
        if config.run.copy_to is not None:
            require_boto3()
        probe_root(self.folder.path)
        self.display = make_display(config.observe.display)
        self.display.start(config, self.folder.path, history(self.folder))
        if count := faults(self.folder, self.attempt):
            self.display.restarted(count)
        self.display.phase("check")
        self.heartbeat.start()
        if before := self._checked_before(config):
            self._take(before)
            return
        self.check = InputCheck(config)
        # The start goes on meanwhile where a recipe that is wrong fences no other driver and takes nobody's machines.
        ended = all(read_verdict(self.folder, earlier) is not None for earlier in range(1, self.attempt))
        if not ended or config.cluster.address != "local":
            self._take(self.check.result())

    def _take(self, checked: CheckedInput) -> None:
        """Model and data are found to be good."""
        self.checked = checked
        replace_file(self.folder.checked(self.attempt), encode_checked(checked))
        for warning in checked.warnings:
            self.display.message(warning, warning=True)

    def _checked_before(self, config: Config) -> CheckedInput | None:
        """What the attempt before found, when the supervisor says that this one only takes its place."""
        before = self.folder.checked(self.attempt - 1)
        same = self.restarted and before.exists() and self._config_of(self.attempt - 1) == digest(config)
        return decode_checked(before.read_bytes()) if same else None

    def _config_of(self, attempt: int) -> str:
        own = self.folder.attempt(attempt) / "config.yaml"
        return digest(read_resolved(own)) if own.exists() else ""

    async def run(self) -> Verdict:
        """Start the workers, or take over living ones, and train."""
        # Ray is imported only once nothing cheap can go wrong any more, and reads its environment at import.
        os.environ.update(ray_environment(self.config))
        import ray

        from argusrl.cluster.plan.prediction import require_fit
        from argusrl.training.bring_up import Hiring, hire
        from argusrl.training.copies import copies_sent
        from argusrl.training.fleet import Position
        from argusrl.training.joined import machine_of_nodes
        from argusrl.training.placement import place
        from argusrl.training.telemetry import RayMetrics, telemetry_of
        from argusrl.training.trainer import train_under_watch

        config = self.config
        assert config is not None
        submission = int(os.environ.get(SUBMISSION_VARIABLE) or 0)
        require_newest(self.folder, submission)  # pods of a lost node may wake up when the run is elsewhere
        epoch = claim_epoch(self.folder, {"attempt": self.attempt, "submission": submission})
        require_newest(self.folder, submission)
        sweep_temporaries(self.folder)
        rows = history(self.folder)
        telemetry = self.heartbeat.telemetry = telemetry_of(self.folder, self.attempt, config, rows)
        telemetry.phase(self.heartbeat.name)
        events = EventLog(self.folder.events, heard=telemetry.heard)
        events.write(
            "attempt",
            f"attempt {self.attempt} on {socket.gethostname()}",
            attempt=self.attempt,
            epoch=epoch.number,
            started=psutil.Process().create_time(),
        )
        sinks = open_sinks(config, self.folder, rows, partial(_note, events), telemetry)
        del rows  # of all committed steps: a driver does not grow with them
        self.display.phase("ray start")
        environment = resolve_environment(config.cluster.environment)
        placement = place(config.cluster, environment, run=self.folder, epoch=epoch.number)
        position = Position(epoch.number)
        try:
            if config.cluster.address != "local":
                for warning in require_fit(config, machine_of_nodes(config, ray.nodes())):
                    self.display.message(warning, warning=True)
            hiring = Hiring(config, self.folder, placement, self.logs, position)
            if self.checked is None:
                assert self.check is not None
                hiring.begin_engines()
                self._take(await asyncio.to_thread(self.check.result))
            assert self.checked is not None
            hiring.checked = self.checked
            run = self._run_of(hiring, hire(hiring), epoch, events)
            self.heartbeat.run = run
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, run.stop.set)
            with RayMetrics(telemetry):
                outcome = await train_under_watch(run, sinks)
        finally:
            if self._fenced(position.epoch):
                placement.leave()
            else:
                placement.close()
            sinks.close()
        await copies_sent(run)
        return Verdict(
            outcome="complete",
            exit_code=0,
            reason=outcome.stopped_early or f"all {outcome.steps} steps are committed",
            step=outcome.steps,
            time=time.time(),
            details={"stopped_early": outcome.stopped_early} if outcome.stopped_early else {},
        )

    def _fenced(self, epoch: int) -> bool:
        """Whether another driver claimed the run since: what works for it must not end with this one."""
        with suppress(StorageError):
            return newest_epoch(self.folder) > epoch
        return False

    def _run_of(self, hiring: Hiring, workers: Workers, epoch: Epoch, events: EventLog) -> Run:
        from argusrl.training.copies import copies_for
        from argusrl.training.healing import Healing
        from argusrl.training.phases import Colocation
        from argusrl.training.run import Run
        from argusrl.training.shooting import rehearsal_of

        config, layout = hiring.config, hiring.placement.layout
        run = Run(
            config=config,
            config_sha256=digest(read_resolved(self.folder.config)),
            folder=self.folder,
            epoch=epoch,
            chain=CommitChain(self.folder, epoch),
            workers=workers,
            colocation=Colocation(workers.engines, workers.ranks, shared=layout.colocate),
            checked=hiring.checked,
            order=PromptOrder(
                hiring.checked.prompts,
                config.run.seed,
                config.data.shuffle,
                window=config.algorithm.prompts_per_step,
            ),
            events=events,
            display=self.display,
            dtype=config.model.dtype_on(layout.device),
            conditions=conditions(config, layout.ranks, layout.device),
            workers_share_gpus=layout.colocate and layout.device == "cuda",
            on_phase=self.heartbeat.phase,
            attempt=self.attempt,
        )
        run.healing = Healing(run, hiring)
        run.rehearsal = rehearsal_of(run)
        run.copies = copies_for(run, asyncio.get_running_loop())
        return run


def ray_environment(config: Config | None) -> dict[str, str]:
    """Variables that Ray reads when it is imported."""
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    if config is not None and config.cluster.address == "local" and HEAD_FOLDER not in os.environ:
        # A token of its own per attempt: other users of this machine cannot submit work to its Ray, and nothing lands
        # in the home folder.
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return variables


def faults(folder: RunFolder, attempt: int) -> int:
    """How many attempts before this one ended by a fault."""
    verdicts = (read_verdict(folder, earlier) for earlier in range(1, attempt))
    return sum(verdict is not None and verdict.outcome in ("failed", "killed") for verdict in verdicts)


def conditions(config: Config, ranks: int, device: str) -> dict[str, Any]:
    """What a bit-exact replay needs to be the same."""
    return {
        "ranks": ranks,
        "threads": config.training.threads,
        "device": device,
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "peft", "ray")},
    }


def failure_text(folder: RunFolder, verdict: Verdict) -> str:
    """What a person reads when the attempt did not complete."""
    mark = "" if verdict.outcome == "interrupted" else "error: "
    if not folder.commit(0).exists():
        return f"{mark}{verdict.reason}"
    where = f"Run folder: {folder.path} (step {verdict.step or 0} is committed; logs in {folder.attempts})"
    return f"{mark}{verdict.reason}\n{where}"


def closing_lines(folder: RunFolder, verdict: Verdict) -> list[str]:
    """What a person reads at the end: how it went, where everything is, what to do next."""
    lines = [f"Complete: {verdict.reason}."]
    evaluations = list(read_evaluations(folder, verdict.step or 0))
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        for name in ("sampled", "greedy"):
            before, after = first[name], last[name]
            lines.append(
                f"Held-out accuracy, {name}: {before['accuracy']:.3f} → {after['accuracy']:.3f} "
                f"(95 % {after['low']:.3f}–{after['high']:.3f}, n = {after['count']})"
            )
    relative = os.path.relpath(folder.path)
    lines += [
        f"Run folder: {relative}",
        "Next:",
        f"  argusrl runs show {relative}        what happened, step by step",
        f"  argusrl evaluate {relative}         base against adapter, again",
        f"  argusrl export {relative} --to DIR  the adapter as a PEFT folder (--merge: a whole model)",
        f"  tensorboard --logdir {relative}/tensorboard",
    ]
    return lines


def _note(events: EventLog, kind: str, text: str) -> None:
    events.write(kind, text)


class _HeartbeatThread:
    """Rewrites heartbeat.json every few seconds, so that others see until when this attempt lived and what it did."""

    def __init__(self, folder: RunFolder, attempt: int) -> None:
        self.folder, self.attempt = folder, attempt
        self.name = "start"
        self.phases = PhaseLog(folder.phases(attempt))
        self.run: Any = None
        self.telemetry: Telemetry | None = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def phase(self, name: str) -> None:
        self.name = name
        if self.telemetry is not None:
            self.telemetry.phase(name)
        if self.run is not None:
            self.phases.note(name, step=self.run.state.step + 1, epoch=self.run.epoch.number)

    def stop(self) -> None:
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join(timeout=_HEARTBEAT_SECONDS)

    def _beat(self) -> None:
        while True:
            with suppress(ArgusError):  # a full disk is noticed where it matters
                write_heartbeat(
                    self.folder,
                    self.attempt,
                    Heartbeat(
                        time=time.time(),
                        pid=os.getpid(),
                        host=socket.gethostname(),
                        epoch=self.run.epoch.number if self.run else 0,
                        step=self.run.state.step if self.run else 0,
                        phase=self.name,
                    ),
                )
                if self.telemetry is not None:
                    self.telemetry.beat(time.time())
            if self.ended.wait(_HEARTBEAT_SECONDS):
                return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
