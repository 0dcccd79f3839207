"""A probe on every node of the cluster, and what the driver makes of their readings.

Probes tell; they decide nothing. One that hangs or dies is made again, and the run does not notice.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from argusrl.cluster.hang_reports import end_line
from argusrl.cluster.node_findings import NodeHistory, measured
from argusrl.cluster.node_probe import Reading
from argusrl.errors import ArgusError, StorageError, WorkerError
from argusrl.journal.node_reports import Finding, NodeReport, write_node_reports
from argusrl.storage.layout import RunFolder
from argusrl.training.calls import call, settle
from argusrl.training.fleet import kill
from argusrl.training.placement import is_head
from argusrl.training.probe_worker import ProbeWorker

_LOOK_SECONDS = 2.0  # between two looks for nodes that joined
_REPORT_EVERY = 5  # looks
_LOGS_EVERY = 30
_ANSWER_SECONDS = 5.0
_ROUND_SECONDS = 1.0
_START_SECONDS = 60.0
_AGAIN_SECONDS = 30.0  # after a probe died
_LOGS_BYTES = 8 << 20  # of a node
_ALL_LOGS_BYTES = 256 << 20  # of all nodes
_MOST_REPORTS = 256  # nodes that are gone included


@dataclass(slots=True)
class _Probe:
    """The probe of one node, and what it told."""

    node: str  # Ray's id
    address: str
    head: bool
    actor: Any = None
    reading: Reading | None = None
    history: NodeHistory = field(default_factory=NodeHistory)
    offset_seconds: float = 0.0
    alive: bool = True
    made_at: float = -math.inf
    fresh: bool = True  # has not answered yet
    findings: list[Finding] = field(default_factory=list)
    asked: asyncio.Task[None] | None = None
    keeping: asyncio.Future[Any] | None = None  # the answer to the last wish that it keep logs

    @property
    def place(self) -> str:
        """A name for its logs."""
        return (self.reading.pod if self.reading else "") or self.node[:12]


@dataclass(slots=True)
class Probes:
    """By Ray node. `start` it in the driver's loop; `stop` keeps the last logs."""

    folder: RunFolder
    attempt: int
    logs: Path
    environment: dict[str, str]
    secret_names: Sequence[str] = ()  # of variables in it
    progress: Callable[[], str] = str  # what the run is doing, in one line
    hang_seconds: tuple[float, float] | None = None  # without a new line, and until the first; None reports no hangs
    _told: tuple[Any, str] = (None, "")  # the actor that repeats the lines, and the last one
    _probes: dict[str, _Probe] = field(default_factory=dict)
    _task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self) -> None:
        """Begin to watch the nodes."""
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Keep the logs of all nodes a last time, and end the probes."""
        if self._task is None:
            return
        tasks = [self._task, *(probe.asked for probe in self._probes.values() if probe.asked is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._told[0] is not None:
            await self._say(self._told[0], end_line(f"attempt {self.attempt}"))
        await self._keep_logs()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._write()
        for probe in self._probes.values():
            kill(probe.actor)

    async def node_of(self, pod: str, patience_seconds: float) -> str | None:
        """The living Ray node of a pod; waits for probes that have not answered yet.

        Not by the Kubernetes node: another pod may be there by now.
        """
        deadline = time.monotonic() + patience_seconds
        while True:
            changed = self._changed
            if found := self.known(pod):
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await changed.wait()

    def known(self, pod: str) -> str | None:
        """The living Ray node of a pod, by what probes have told."""
        living = (probe for probe in self._probes.values() if probe.alive and probe.reading is not None)
        return next((probe.node for probe in living if probe.reading and probe.reading.pod == pod), None)

    async def leave(self, node: str) -> bool:
        """Have Ray on a node end in good order; whether it was told to."""
        probe = self._probes.get(node)
        if probe is None or probe.actor is None:
            return False
        try:
            return bool(await call(probe.actor.leave.remote(), _ANSWER_SECONDS, "leave", f"probe of {probe.place}"))
        except ArgusError as fault:  # the daemon may be gone before the answer is there
            logging.info("%s", fault.message)
            return False

    async def keep_logs_of(self, node: str) -> None:
        """Keep the logs of one node now: it goes."""
        if node in self._probes:
            await self._keep_logs([self._probes[node]])

    async def _watch(self) -> None:
        looks = 0
        while True:
            try:
                await self._follow()
                if looks % _REPORT_EVERY == 0 or any(map(_starts, self._answering())):
                    await self._read()
                    await self._write()
                await self._tell_progress()
                if looks % _LOGS_EVERY == _LOGS_EVERY - 1:
                    await self._keep_logs()
            except Exception:  # whatever is wrong with probes is no fault of the run
                logging.exception("looking at the nodes failed")
            looks += 1
            await asyncio.sleep(_LOOK_SECONDS)

    async def _follow(self) -> None:
        """A probe for every node that lives."""
        table = await asyncio.to_thread(ray.nodes)
        living = {node["NodeID"]: node for node in table if node["Alive"]}
        for gone in self._probes.keys() - living.keys():
            self._probes[gone].alive, self._probes[gone].actor = False, None
        for node, entry in living.items():
            probe = self._probes.setdefault(node, _Probe(node, entry["NodeManagerAddress"], is_head(entry)))
            if probe.actor is None and time.monotonic() - probe.made_at > _AGAIN_SECONDS:
                probe.actor, probe.made_at, probe.fresh = self._make(node), time.monotonic(), True
        for oldest in list(self._probes)[: max(0, len(self._probes) - _MOST_REPORTS)]:
            if not self._probes[oldest].alive:
                del self._probes[oldest]

    def _make(self, node: str) -> Any:
        options = {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": 4,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
            "runtime_env": {"env_vars": {**self.environment, "OMP_NUM_THREADS": "1"}},
        }
        return ray.remote(ProbeWorker).options(**options).remote(self.folder.path, self.secret_names)

    async def _read(self) -> None:
        """Ask all probes; those that are slow, or start, are not waited for."""
        for probe in self._answering():
            if probe.asked is None or probe.asked.done():
                probe.asked = asyncio.create_task(self._read_one(probe))
        asked = [probe.asked for probe in self._answering() if probe.asked is not None]
        if asked:
            await asyncio.wait(asked, timeout=_ROUND_SECONDS)

    async def _read_one(self, probe: _Probe) -> None:
        deadline = _START_SECONDS if probe.fresh else _ANSWER_SECONDS
        before = time.time()
        try:
            reading: Reading = await call(probe.actor.read.remote(), deadline, "read", f"probe of {probe.place}")
        except WorkerError as fault:
            logging.info("%s", fault.message)
            kill(probe.actor)
            probe.actor = None
            return
        except ArgusError as fault:  # it hangs: it may go on
            logging.info("%s", fault.message)
            return
        after = time.time()
        probe.reading, probe.fresh = reading, False
        probe.offset_seconds = reading.time - (before + after) / 2
        probe.findings = probe.history.add(reading, probe.offset_seconds, (after - before) / 2)
        self._changed.set()
        self._changed = asyncio.Event()

    def _answering(self) -> list[_Probe]:
        return [probe for probe in self._probes.values() if probe.actor is not None]

    async def _tell_progress(self) -> None:
        """Have a probe repeat what the run is doing: HyperPod's agents watch workers, where there are GPUs."""
        if self.hang_seconds is None:
            return
        ready = [probe for probe in self._answering() if not probe.fresh]
        actor = next((probe.actor for probe in sorted(ready, key=lambda one: (one.head, one.made_at))), None)
        told, line = self._told
        if actor is not None and told not in [probe.actor for probe in ready]:
            told, line = actor, ""
            reply = actor.report_hangs.remote(*self.hang_seconds)
            for answer in await settle([reply], _START_SECONDS, "report_hangs", ["probe"]):
                logging.info("%s", answer)
        if told is not None and (now := self.progress()) != line:
            await self._say(told, now)
            line = now
        self._told = (told, line)

    async def _say(self, actor: Any, line: str) -> None:
        await settle([actor.progress.remote(line)], _ROUND_SECONDS, "progress", ["probe"])

    async def _write(self) -> None:
        reports = [_report(probe) for probe in self._probes.values()]
        with suppress(StorageError):
            await asyncio.to_thread(write_node_reports, self.folder, self.attempt, reports)

    async def _keep_logs(self, probes: Iterable[_Probe] | None = None) -> None:
        wanted = self._answering() if probes is None else probes
        asked = [probe for probe in wanted if probe.actor is not None and not _keeps(probe)]
        each = min(_LOGS_BYTES, _ALL_LOGS_BYTES // max(1, len(self._probes)))
        for probe in asked:
            reference = probe.actor.keep_logs.remote(self.logs / "nodes" / probe.place, each)
            probe.keeping = asyncio.ensure_future(_answer_of(reference))
            probe.keeping.add_done_callback(_seen)
        references = [asyncio.shield(probe.keeping) for probe in asked if probe.keeping is not None]
        names = [f"probe of {probe.place}" for probe in asked]
        for fault in await settle(references, _ANSWER_SECONDS, "keep_logs", names):
            if isinstance(fault, ArgusError):
                logging.info("%s", fault.message)


def _starts(probe: _Probe) -> bool:
    """Whether it was made a moment ago and has not answered yet."""
    return probe.fresh and time.monotonic() - probe.made_at < _START_SECONDS


def _keeps(probe: _Probe) -> bool:
    """Whether it still copies logs: where storage hangs, more wishes would take the threads that its readings need."""
    return probe.keeping is not None and not probe.keeping.done()


async def _answer_of(reference: Any) -> Any:
    return await reference


def _seen(future: asyncio.Future[Any]) -> None:
    """Nobody need ask for its exception."""
    if not future.cancelled():
        future.exception()


def _report(probe: _Probe) -> NodeReport:
    reading = probe.reading
    return NodeReport(
        ray_node=probe.node,
        address=probe.address,
        head=probe.head,
        pod=reading.pod if reading else "",
        node=reading.node if reading else "",
        time=reading.time if reading else 0.0,
        alive=probe.alive,
        measured=measured(reading, probe.offset_seconds) if reading else {},
        findings=probe.findings,
    )
