"""`argusrl cluster watch`: finds the runs of its namespaces and keeps each under control, until it is told to stop.

It holds nothing that a new one would miss. Two may run side by side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argusrl.cluster.decide import Decision
from argusrl.cluster.hyperpod import HyperPod
from argusrl.cluster.kinds import RAY_CLUSTER, RAY_JOB
from argusrl.cluster.kube_api import KubeApi, KubeError, Object, annotations_of, name_of
from argusrl.cluster.names import FOLDER_ANNOTATION, JOB_ANNOTATION
from argusrl.cluster.node_care import NodeCare
from argusrl.cluster.notices import Notices
from argusrl.cluster.notify import Channel, channels, reward_collapse
from argusrl.cluster.observation import Limits
from argusrl.cluster.run_control import RunControl
from argusrl.cluster.run_record import RunRecord
from argusrl.cluster.targets import ClusterJobTarget, RayJobsApi, RayJobTarget, Target
from argusrl.config.load import read_resolved
from argusrl.config.sections import ClusterSection
from argusrl.errors import ArgusError
from argusrl.journal.submissions import JOB_KIND, newest_submission, read_end, read_submission
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import read_lines

POLL_SECONDS = 5.0
SELECTOR = "app.kubernetes.io/name=argusrl"
_SCAN_SECONDS = 60.0  # between two looks for run folders whose objects nobody shows
_THREADS = 16


@dataclass(slots=True)
class Watched:
    """One run under control."""

    control: RunControl
    care: NodeCare
    namespace: str
    channels: list[Channel] = field(default_factory=list)
    section: ClusterSection = field(default_factory=ClusterSection)
    config_mark: tuple[int, int] | None = None  # of the config file that the section is from
    steps_seen: int = 0
    work: Future[Decision | None] | None = None

    @property
    def over(self) -> bool:
        """Whether the last look found an end on record and no object."""
        view, sight = self.control.view, self.control.sight
        idle = self.work is None or self.work.done()
        return idle and view is not None and view.end is not None and sight.job == "absent"


@dataclass(slots=True)
class Controller:
    """`reconcile` looks at everything once; `run` does so every few seconds."""

    root: Path  # below which run folders lie, as this process sees it
    kube: KubeApi
    namespaces: Sequence[str] = ("",)  # "" is all
    jobs_of: Callable[[Object], RayJobsApi] | None = None
    hyperpod: Callable[[str], HyperPod | None] = lambda _: None
    say: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    runs: dict[Path, Watched] = field(default_factory=dict)
    _scanned_at: float = float("-inf")
    _complaint: str = ""

    def run(self, stop: threading.Event, poll_seconds: float = POLL_SECONDS) -> None:
        """Look every few seconds until `stop`. A run whose storage hangs does not hold up the others."""
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="argusrl-run") as pool:
            while not stop.is_set():
                began = self.clock()
                for watched, listed in self._found():
                    if watched.work is None or watched.work.done():
                        watched.work = pool.submit(self._look, watched, listed)
                stop.wait(max(0.0, poll_seconds - (self.clock() - began)))
        self.close()

    def reconcile(self) -> list[Watched]:
        """Look at every run once; those that there are."""
        found = list(self._found())
        for watched, listed in found:
            self._look(watched, listed)
        return [watched for watched, _ in found]

    def close(self) -> None:
        """Deliver what is still to be told."""
        for watched in self.runs.values():
            for channel in watched.channels:
                channel.close()

    # ---- finding runs

    def _found(self) -> Iterable[tuple[Watched, list[Object]]]:
        objects: dict[Path, list[Object]] = {path: [] for path in self.runs}
        try:
            for namespace in self.namespaces:
                self._list(namespace, objects)
        except KubeError as error:
            self._complain(error.message)
        else:
            self._complaint = ""
        self._scan(objects)
        for path, found in objects.items():
            if not found and path in self.runs and self.runs[path].over:
                self._forget(path)
            else:
                yield self._watched(path, found), found

    def _forget(self, path: Path) -> None:
        """A run that has ended, and of which nothing is left in the cluster."""
        for channel in self.runs.pop(path).channels:
            channel.close(0.0)

    def _list(self, namespace: str, objects: dict[Path, list[Object]]) -> None:
        for found in self.kube.list(RAY_JOB, namespace, labels=SELECTOR).items:
            if (path := self._path(found)) is not None:
                objects.setdefault(path, []).append(found)
        for found in self.kube.list(RAY_CLUSTER, namespace).items:
            if JOB_ANNOTATION in annotations_of(found) and (path := self._path(found)) is not None:
                objects.setdefault(path, []).append(found)

    def _path(self, found: Object) -> Path | None:
        """The run folder of an object, if it lies where this controller may write."""
        text = annotations_of(found).get(FOLDER_ANNOTATION, "")
        path = Path(text)
        if not text or not path.is_absolute() or ".." in path.parts or self.root not in path.parents:
            self._complain(f"{name_of(found)}: its run folder {text or '(none)'} is not below {self.root}")
            return None
        return path

    def _scan(self, objects: dict[Path, list[Object]]) -> None:
        """Runs that are to go on and have no object: their controller died between two calls."""
        if self.clock() - self._scanned_at < _SCAN_SECONDS:
            return
        self._scanned_at = self.clock()
        try:
            folders = [path.parent for path in self.root.glob("*/submissions")]
        except OSError:
            return
        for path in folders:
            if path in objects:
                continue
            try:
                number = newest_submission(RunFolder(path))
                if number and read_end(RunFolder(path), number) is None:
                    objects[path] = []
            except ArgusError as error:
                self._complain(error.message)

    def _watched(self, path: Path, found: Sequence[Object]) -> Watched:
        if path not in self.runs:
            run = RunFolder(path)
            notices = Notices(run, wall=self.wall)
            control = RunControl(
                record=RunRecord(run, self.root.is_dir),
                target=self._target(run, found),
                kube=self.kube,
                notices=notices,
                clock=self.clock,
                wall=self.wall,
            )
            care = NodeCare(control, self.kube, hyperpod=self.hyperpod, clock=self.clock, wall=self.wall)
            namespace = str(found[0]["metadata"].get("namespace", "")) if found else ""
            self.runs[path] = Watched(control, care, namespace)
        return self.runs[path]

    def _target(self, run: RunFolder, found: Sequence[Object]) -> Target:
        """By what stands in the cluster; where nothing does, by what is on record."""
        is_job = any(JOB_ANNOTATION in annotations_of(one) for one in found)
        if not found:
            try:
                number = newest_submission(run)
                is_job = bool(number) and read_submission(run, number).kind == JOB_KIND
            except ArgusError:
                is_job = False
        if is_job and self.jobs_of is not None:
            return ClusterJobTarget(self.kube, self.jobs_of)
        return RayJobTarget(self.kube)

    # ---- one run

    def _look(self, watched: Watched, listed: Sequence[Object]) -> Decision | None:
        control, before = watched.control, watched.control.last
        try:
            self._settings(watched)
            decision = control.reconcile(listed)
            watched.care.look()
            self._rewards(watched)
        except Exception as error:  # one run's trouble is not another's
            self._complain(f"{control.name}: {type(error).__name__}: {error}")
            return None
        if before is None or (before.row, before.action) != (decision.row, decision.action):
            self.say(f"{control.name}: {decision.action} ({decision.row}): {decision.reason}")
        return decision

    def _settings(self, watched: Watched) -> None:
        """The cluster section of the run's config, read again when that file changes."""
        path = watched.control.record.run.config
        try:
            status = path.stat()
        except OSError:  # not there yet, or storage is away: what was known holds
            return
        mark = (status.st_mtime_ns, status.st_size)
        if mark == watched.config_mark:
            return
        watched.config_mark = mark
        section = read_resolved(path).cluster
        budget = section.budget
        watched.control.limits = Limits(
            resubmissions=budget.resubmissions,
            gpu_hours=budget.gpu_hours,
            capacity_wait_seconds=budget.capacity_wait_seconds,
        )
        if section.notify != watched.section.notify:
            for channel in watched.channels:
                channel.close(0.0)
            watched.channels = channels(section.notify, self._complain)
            watched.control.notifiers = [*watched.channels]
        watched.section = watched.care.section = section

    def _rewards(self, watched: Watched) -> None:
        view = watched.control.view
        if view is None or view.folder != "well" or view.steps == watched.steps_seen or view.end is not None:
            return
        watched.steps_seen = view.steps
        collapse = reward_collapse(read_lines(watched.control.record.run.metrics))
        if collapse is not None:
            best_step, text = collapse
            watched.control.tell("reward", f"collapse:{best_step}", text)

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self.say(text)
        self._complaint = text


def standing(watched: Watched) -> dict[str, Any]:
    """How a run stands by the last look, for `--json`."""
    control, decision = watched.control, watched.control.last
    view, sight = control.view, control.sight
    return {
        "run": control.name,
        "folder": str(control.record.run.path),
        "submission": view.number if view is not None else 0,
        "attempt": view.attempt if view is not None else 0,
        "step": view.steps if view is not None else 0,
        "gpu_hours": round(view.gpu_hours, 3) if view is not None else 0.0,
        "job": sight.job,
        "head": sight.head,
        "node": sight.head_node,
        "row": decision.row if decision is not None else "",
        "action": decision.action if decision is not None else "",
        "reason": decision.reason if decision is not None else "",
    }
