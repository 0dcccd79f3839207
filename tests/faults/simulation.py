"""One seed of the simulation: drivers and workers of one run, their storage, and everything that befalls them.

Only one task runs at a time; at every storage call the seed decides who runs next and what breaks. Nothing sleeps: a
paused task wakes after a number of storage calls. What a task is told to be durable is held against the run folder
after each power loss and at the end.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from argusrl.config.sections import RecoverySection
from argusrl.errors import ArgusError, FencedError, StorageError, WorkerError
from argusrl.journal import commits
from argusrl.journal.commits import CommitChain
from argusrl.journal.episodes import EpisodeJournal, SealedStep
from argusrl.journal.epochs import newest_epoch, renew_epoch
from argusrl.journal.retention import durable_checkpoints
from argusrl.journal.verify import verify_run
from argusrl.recovery.decide import AttemptEnd, decide_attempt
from argusrl.storage import publish, sealed_json
from argusrl.storage.layout import RunFolder
from argusrl.training.fence import Fence
from argusrl.types import AdapterRef, TrajectoryKey, TrajectoryRef
from faults.simulated_disk import ROOT, SimulatedDisk, patched
from faults.small_driver import GROUP_SIZE, SmallDriver, broken_promises, logical_content, play

WORKERS = 2
_RECOVERY = RecoverySection(max_restarts=3, window_seconds=10_000.0)
MOST_ATTEMPTS = 40  # more than any seed's faults can cost
_FAULTY = ("create", "write", "fsync", "link", "rename", "unlink", "mkdir")


class Killed(BaseException):
    """The process that made this storage call is dead."""


class Broken(AssertionError):
    """An invariant does not hold."""


class Process:
    """A driver or a worker: alive until killed."""

    def __init__(self, name: str) -> None:
        self.name, self.dead = name, False


@dataclass(eq=False)
class Task:
    """A thread that runs only while the simulation lets it."""

    process: Process
    body: Callable[[], None]
    turn: threading.Lock = field(default_factory=threading.Lock)
    wakes_at: int = 0  # storage calls of the whole simulation
    ended: bool = False


class Worker(Process):
    """An episode worker: fenced, one call at a time, its answers repeatable."""

    def __init__(self, run: RunFolder, name: str) -> None:
        super().__init__(name)
        self.run = run
        self.fence = Fence()
        self.busy = False
        self.served = 0  # newest epoch it did anything for
        self.begun: tuple[int, int] | None = None
        self.journal: EpisodeJournal | None = None
        self.refs: dict[int, TrajectoryRef] = {}

    def begin(self, epoch: int, step: int, adapter: AdapterRef, adopts: bool) -> list[TrajectoryRef]:
        if self.begun != (epoch, step):
            if self.journal is not None:
                self.journal.abandon()
            self.journal = EpisodeJournal(self.run, step, epoch, self.name)
            self.begun, self.refs = (epoch, step), {}
            if adopts:
                found = self.journal.adopt(adapter.sha256).trajectories
                self.refs = {ref.key.sample: ref for ref in found}
        return list(self.refs.values())

    def play(self, epoch: int, step: int, sample: int, adapter: AdapterRef) -> TrajectoryRef:
        journal = self._journal(epoch, step)
        if sample not in self.refs:
            self.refs[sample] = play(journal, TrajectoryKey(step, "p0", sample), adapter)
        return self.refs[sample]

    def seal(self, epoch: int, step: int) -> SealedStep:
        return self._journal(epoch, step).seal()

    def _journal(self, epoch: int, step: int) -> EpisodeJournal:
        if self.journal is None or self.begun != (epoch, step):
            raise WorkerError(f"{self.name} has not begun step {step} of epoch {epoch}")
        return self.journal


class Driver(SmallDriver):
    """Its rollouts are calls to the workers; a broken one is healed under a new epoch."""

    def __init__(self, simulation: Simulation, process: Process) -> None:
        super().__init__(simulation.run, simulation.hear, steps=simulation.steps)
        self.simulation, self.process = simulation, process

    def step(self, step: int) -> None:
        try:
            super().step(step)
        except WorkerError:
            self.epoch = renew_epoch(self.epoch)
            self.chain = CommitChain(self.run, self.epoch)
            head = self.chain.head()
            assert head is not None
            self.head = head
            self.say("claimed", self.epoch.number)

    def rollout(self, step: int) -> tuple[list[TrajectoryRef], list[SealedStep]]:
        call, refs = self._call, {}
        for number in range(WORKERS):
            refs |= {ref.key.sample: ref for ref in call(number, "begin", step, self.head.adapter, number == 0)}
        for sample in range(GROUP_SIZE):
            if sample not in refs:
                refs[sample] = call(sample % WORKERS, "play", step, sample, self.head.adapter)
                self.say("finished", step, sample, self.epoch.number)
        sealed = [call(number, "seal", step) for number in range(WORKERS)]
        return [refs[sample] for sample in range(GROUP_SIZE)], sealed

    def _call(self, number: int, method: str, step: int, *rest: Any) -> Any:
        return self.simulation.deliver(self.process, number, method, self.epoch.number, step, *rest)


class Simulation:
    """`play()` raises Broken, or whatever the code under test should not raise."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.disk = SimulatedDisk(self.random)
        self.disk.interrupt, self.disk.who = self.interrupt, self.who
        self.run = RunFolder(Path(ROOT) / "run")
        self.steps = self.random.randint(1, 2)
        self.faults_left = self.random.choice((0, 1, 1, 2, 2, 3, 4))
        self.fault_rate = self.random.choice((0.002, 0.01, 0.03))
        self.switch_rate = self.random.choice((0.02, 0.1, 0.3))
        self.disk.stale_listings = self.random.choice((0.0, 0.0, 0.0, 0.3))
        self.clock = 0
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.stack: dict[Task, list[Process]] = {}  # a driver's call runs in its worker's name
        self.control = threading.Lock()
        self.control.acquire()
        self.said: list[list[Any]] = []
        self.workers = [Worker(self.run, f"w{number}") for number in range(WORKERS)]
        self.made = WORKERS
        self.history: list[AttemptEnd] = []
        self.attempts = 0
        self.power_is_off = self.split = False
        self.failure: BaseException | None = None

    # The scheduler.

    def start(self, process: Process, body: Callable[[], None]) -> None:
        task = Task(process, body)
        task.turn.acquire()
        self.tasks.append(task)
        self.stack[task] = [process]
        threading.Thread(target=self._run, args=(task,), daemon=True).start()

    def _run(self, task: Task) -> None:
        task.turn.acquire()
        try:
            self._check_alive()
            task.body()
        except Killed:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        task.ended = True
        self.tasks.remove(task)
        self._hand_over(self._next())

    def _hand_over(self, task: Task | None) -> None:
        self.current = task
        (self.control if task is None else task.turn).release()

    def _next(self) -> Task | None:
        if not self.tasks or self.failure:
            return None
        ready = [task for task in self.tasks if task.wakes_at <= self.clock]
        if not ready:
            task = min(self.tasks, key=lambda task: task.wakes_at)
            self.clock = task.wakes_at
            return task
        return ready[0] if len(ready) == 1 else self.random.choice(ready)

    def switch(self) -> None:
        """Let somebody else run, perhaps."""
        task, other = self.current, self._next()
        if other is not task:
            assert task is not None
            self._hand_over(other)
            task.turn.acquire()
        self._check_alive()

    def _check_alive(self) -> None:
        assert self.current is not None
        if self.failure or self.stack[self.current][-1].dead:
            raise Killed

    def who(self) -> Process | None:
        return self.stack[self.current][-1] if self.current else None

    # What befalls it.

    def interrupt(self, call: str, path: str) -> str | None:
        if self.current is None:
            return None
        self.clock += 1
        self._check_alive()
        fault = None
        if self.faults_left and self.random.random() < self.fault_rate:
            fault = self._befall(call)
            self._check_alive()
        if len(self.tasks) > 1 and self.random.random() < self.switch_rate:
            self.switch()
        return fault

    def _befall(self, call: str) -> str | None:
        self.faults_left -= 1
        task = self.current
        assert task is not None
        kind = self.random.choice(("error", "error", "kill driver", "kill worker", "power", "pause", "second driver"))
        if kind == "error" and call in _FAULTY:
            return self.random.choice(("EIO", "ENOSPC") if call != "fsync" else ("EIO",))
        if kind == "kill driver":
            self.random.choice([task.process for task in self.tasks]).dead = True
        elif kind == "kill worker":
            self.random.choice(self.workers).dead = True
        elif kind == "power":
            for one in self.tasks:
                one.process.dead = True
            for worker in self.workers:
                worker.dead = True
            self.power_is_off = True
        elif kind in ("pause", "second driver") and not self.power_is_off:
            task.wakes_at = self.clock + self.random.randrange(600)
            self.split = True
            self.launch()
            self.switch()
        return None

    def deliver(self, driver: Process, number: int, method: str, epoch: int, step: int, *rest: Any) -> Any:
        """A call of a driver to a worker. Raises WorkerError where no answer comes."""
        if self.workers[number].dead:
            self.made += 1
            self.workers[number] = Worker(self.run, f"w{self.made}")
        worker = self.workers[number]
        fate = "arrives"
        if self.faults_left and self.random.random() < 0.02:
            self.faults_left -= 1
            fate = self.random.choice(("request lost", "answer lost", "late", "twice"))

        def again() -> None:
            with suppress(ArgusError, FileExistsError):  # nobody waits for this answer
                self._execute(worker, method, epoch, step, *rest)

        if fate in ("late", "twice"):
            messenger = Process(f"late {method}")
            self.start(messenger, again)
            self.tasks[-1].wakes_at = self.clock + self.random.randrange(400)
        if fate in ("request lost", "late"):
            raise WorkerError(f"no answer of {worker.name} to {method}")
        answer = self._execute(worker, method, epoch, step, *rest)
        if driver.dead:
            raise Killed
        if fate == "answer lost":
            raise WorkerError(f"no answer of {worker.name} to {method}")
        return answer

    def _execute(self, worker: Worker, method: str, epoch: int, step: int, *rest: Any) -> Any:
        while worker.busy:
            self.clock += 1
            self.switch()
        worker.busy = True
        stack = self.stack[self.current]  # type: ignore[index]
        stack.append(worker)
        try:
            self._check_alive()
            worker.fence.check(epoch, step)
            if epoch < worker.served:
                raise Broken(f"{worker.name} served epoch {epoch} after epoch {worker.served}")
            worker.served = epoch
            return getattr(worker, method)(epoch, step, *rest)
        except Killed:
            if self.failure or self.power_is_off:
                raise
            raise WorkerError(f"{worker.name} died in {method}") from None
        except StorageError as error:
            worker.dead = True
            raise WorkerError(f"{worker.name}: {error.message}") from error
        finally:
            stack.pop()
            worker.busy = False

    # The supervisor, and what it may rely on.

    def launch(self) -> None:
        """Start a driver."""
        self.attempts += 1
        if self.attempts > MOST_ATTEMPTS:
            raise Broken(f"the run needs more than {MOST_ATTEMPTS} attempts")
        process = Process(f"driver {self.attempts}")

        def body() -> None:
            code, error_name, message = 0, "", ""
            try:
                Driver(self, process).drive()
            except Killed:
                code = -9
            except (FencedError, StorageError, WorkerError) as error:
                code, error_name, message = error.exit_code, type(error).__name__, error.message
                if isinstance(error, StorageError) and error.exit_code == 6 and not self.disk.stale_listings:
                    raise Broken(f"corruption where there is none: {message}") from error
            self.history.append(
                AttemptEnd(
                    exit_code=code,
                    ended_at=float(self.clock),
                    committed_steps=len(self._committed()),
                    error=error_name,
                    message=message,
                )
            )
            if code:
                raise Killed

        self.start(process, body)

    def _committed(self) -> set[int]:
        return {words[1] for words in self.said if words[0] == "committed"}

    def hear(self, *words: Any) -> None:
        """What a driver believes. It holds at once: nothing runs between its belief and this call."""
        kind = words[0]
        task, self.current = self.current, None  # looking is no storage call of the run
        stale, self.disk.stale_listings = self.disk.stale_listings, 0.0
        try:
            if kind == "finished" and words[3] < newest_epoch(self.run):
                return  # the driver that owns the run now may have adopted what there was already
            self.said.append(list(words))
            if kind == "resumed":
                behind = [step for step in self._committed() if step > words[1]]
                if behind and not stale:  # with a stale listing a fenced driver learns it at its next commit
                    raise Broken(f"resumed at step {words[1]} though {behind} were acknowledged")
                self._require_checkpoint()
            elif kind == "committed" and not stale:
                commit = CommitChain(self.run).read(words[1])
                if commit.epoch != newest_epoch(self.run):
                    raise Broken(f"epoch {commit.epoch} was told that it committed though another drives the run")
        finally:
            self.current, self.disk.stale_listings = task, stale

    def _require_checkpoint(self) -> None:
        told = [words[1] for words in self.said if words[0] == "checkpointed"]
        there = [checkpoint.step for checkpoint in durable_checkpoints(self.run, CommitChain(self.run))]
        if told and max(there, default=-1) < max(told):
            raise Broken(f"the checkpoint of step {max(told)} was acknowledged, there are {there}")

    def play(self) -> None:
        """Until the run is complete and checked."""
        while not any(end.exit_code == 0 for end in self.history) or self.tasks:
            if not self.tasks:
                self._supervise()
            self._hand_over(self._next())
            self.control.acquire()
            self.current = None
            if self.failure:
                self._end_all()
                raise self.failure
            if self.power_is_off:
                self._end_all()
                self._restore_power()
        self.check()

    def _supervise(self) -> None:
        """The rule of the supervisor; where it says stop, a person runs the same command again."""
        if self.history:
            decision = decide_attempt(self.history, _RECOVERY)
            if decision.action == "stop":
                self.history.clear()
        self.launch()

    def _restore_power(self) -> None:
        self.power_is_off = False
        self.disk.power_loss()
        _forget_folders()
        self._hold()

    def _end_all(self) -> None:
        """Let dead tasks unwind."""
        for task in self.tasks:
            task.process.dead = True
            for process in self.stack[task]:
                process.dead = True
        while self.tasks:
            self._hand_over(self.tasks[0])
            self.control.acquire()
        self.current = None

    def _hold(self) -> None:
        """What was promised is there, now."""
        promised = [words for words in self.said if words[0] != "finished" or not self.disk.stale_listings]
        stale, self.disk.stale_listings = self.disk.stale_listings, 0.0
        if broken := broken_promises(self.run, promised):
            raise Broken("; ".join(broken))
        self.disk.stale_listings = stale

    def check(self) -> None:
        """The end: sound, whole, and what the undisturbed run says."""
        self.disk.interrupt = lambda call, path: None
        self._hold()
        self.disk.stale_listings = 0.0
        problems = verify_run(self.run)
        if self.split:  # a driver that lost may have put its older projection in place; the next resume rebuilds it
            problems = [problem for problem in problems if str(self.run.metrics) not in problem]
        if problems:
            raise Broken("; ".join(problems))
        if logical_content(self.run) != undisturbed(self.steps):
            raise Broken("the run ended with another content than the undisturbed one")


_current: SimulatedDisk = SimulatedDisk(Random(0))
_names = Random(0)
_undisturbed: dict[int, list[dict[str, Any]]] = {}


def undisturbed(steps: int) -> list[dict[str, Any]]:
    """The content of a run that nothing befell."""
    global _current
    if steps not in _undisturbed:
        before, _current = _current, SimulatedDisk(Random(0))
        _forget_folders()
        run = RunFolder(Path(ROOT) / "run")
        SmallDriver(run, lambda *_: None, steps=steps).drive()
        _undisturbed[steps] = logical_content(run)
        _current = before
    return _undisturbed[steps]


def _forget_folders() -> None:
    """What processes knew of folders dies with them; the root is where the simulation begins."""
    publish._settled.clear()
    publish._settled.add(ROOT)


@contextmanager
def simulated_storage() -> Iterator[None]:
    """Puts the simulation's storage, clock and random names in place; enter it once for many seeds."""
    clock = [0.0]
    saved = secrets.token_hex, time.time, commits.decode_commit, sealed_json.decode_sealed

    def token_hex(size: int = 16) -> str:
        return f"{_names.getrandbits(8 * size):0{2 * size}x}"

    def now() -> float:
        clock[0] += 0.25
        return clock[0]

    secrets.token_hex, time.time = token_hex, now
    # Pure functions of the bytes they are given; the simulation reads the same files again and again.
    commits.decode_commit = lru_cache(4096)(commits.decode_commit)
    sealed_json.decode_sealed = lru_cache(4096)(sealed_json.decode_sealed)
    try:
        with patched(lambda: _current):
            yield
    finally:
        secrets.token_hex, time.time, commits.decode_commit, sealed_json.decode_sealed = saved


def simulate(seed: int) -> None:
    """Play one seed inside `simulated_storage`. Raises Broken with what does not hold."""
    global _current
    simulation = Simulation(seed)
    _current = simulation.disk
    undisturbed(simulation.steps)
    _names.seed(seed)
    _forget_folders()
    try:
        simulation.play()
    except Exception as error:
        raise Broken(f"seed {seed}: {type(error).__name__}: {error}") from error
