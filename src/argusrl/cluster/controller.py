"""`argusrl cluster watch`: finds the runs of its namespaces and keeps each under control, until it is told to stop.

It holds nothing that a new one would miss. Two may run side by side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_LOOKS_AT_ONCE = 16


@dataclass(slots=True)
class Watched:
    """One run under control."""

    control: RunControl
    care: NodeCare
    channels: list[Channel] = field(default_factory=list)
    section: ClusterSection = field(default_factory=ClusterSection)
    config_mark: tuple[int, int] | None = None  # of the config file that the section is from
    steps_seen: int = 0
    work: threading.Thread | None = None  # the look that is under way

    @property
    def busy(self) -> bool:
        return self.work is not None and self.work.is_alive()

    @property
    def over(self) -> bool:
        """Whether the last look found an end on record and no object."""
        view, sight = self.control.view, self.control.sight
        return not self.busy and view is not None and view.end is not None and sight.job == "absent"


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
    _scan: threading.Thread | None = None
    _unlisted: Mapping[Path, bool] = field(default_factory=dict)  # by the last scan
    _slots: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_LOOKS_AT_ONCE))
    _complaint: str = ""

    def run(self, stop: threading.Event, poll_seconds: float = POLL_SECONDS) -> None:
        """Look every few seconds until `stop`.

        Nothing here waits for storage but the threads of single looks: a run whose storage hangs holds up neither the
        others nor the end.
        """
        while not stop.is_set():
            began = self.clock()
            if self._is_scan_due() and (self._scan is None or not self._scan.is_alive()):
                self._scan = _begin("argusrl-scan", self._look_for_unlisted)
            for watched, listed in self._found():
                if not watched.busy:
                    watched.work = _begin("argusrl-look", self._look_in_turn, watched, listed)
            stop.wait(max(0.0, poll_seconds - (self.clock() - began)))
        self.close()

    def reconcile(self) -> list[Watched]:
        """Look at every run once; those that there are."""
        if self._is_scan_due():
            self._look_for_unlisted()
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
        unlisted = self._unlisted
        if unlisted:  # a scan that ends right now replaces nothing but an empty one
            self._unlisted = {}
        for path in unlisted:
            objects.setdefault(path, [])
        for path, found in objects.items():
            if not found and path in self.runs and self.runs[path].over:
                self._forget(path)
            else:
                yield self._watched(path, found, unlisted.get(path, False)), found

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

    def _is_scan_due(self) -> bool:
        return self.clock() - self._scanned_at >= _SCAN_SECONDS

    def _look_for_unlisted(self) -> None:
        """Runs that are to go on and may have no object: their controller died between two calls."""
        self._scanned_at = self.clock()
        found: dict[Path, bool] = {}
        try:
            folders = [path.parent for path in self.root.glob("*/submissions")]
        except OSError:
            return
        for path in folders:
            try:
                run = RunFolder(path)
                number = newest_submission(run)
                if number and read_end(run, number) is None:
                    found[path] = read_submission(run, number).kind == JOB_KIND
            except ArgusError as error:
                self._complain(error.message)
        self._unlisted = found

    def _watched(self, path: Path, found: Sequence[Object], recorded_as_job: bool) -> Watched:
        if path not in self.runs:
            run = RunFolder(path)
            is_job = recorded_as_job or any(JOB_ANNOTATION in annotations_of(one) for one in found)
            control = RunControl(
                record=RunRecord(run, self.root.is_dir),
                target=self._target(is_job),
                kube=self.kube,
                notices=Notices(run, wall=self.wall),
                clock=self.clock,
                wall=self.wall,
            )
            care = NodeCare(control, self.kube, hyperpod=self.hyperpod, clock=self.clock, wall=self.wall)
            self.runs[path] = Watched(control, care)
        return self.runs[path]

    def _target(self, is_job: bool) -> Target:
        if is_job and self.jobs_of is not None:
            return ClusterJobTarget(self.kube, self.jobs_of)
        return RayJobTarget(self.kube)

    # ---- one run

    def _look_in_turn(self, watched: Watched, listed: Sequence[Object]) -> None:
        with self._slots:
            self._look(watched, listed)

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
        """The cluster section of the run's config, read again when that file changes.

        Raises ArgusError, OSError where it cannot be read and never was: without its limits nothing is decided.
        """
        path = watched.control.record.run.config
        try:
            status = path.stat()
            mark = (status.st_mtime_ns, status.st_size)
            if mark == watched.config_mark:
                return
            section = read_resolved(path).cluster
        except FileNotFoundError:  # not there yet
            return
        except (ArgusError, OSError) as error:
            if watched.config_mark is None:
                raise
            self._complain(f"{watched.control.name}: {error}")  # what was known holds
            return
        budget, told = section.budget, watched.section.notify
        watched.control.limits = Limits(
            resubmissions=budget.resubmissions,
            gpu_hours=budget.gpu_hours,
            capacity_wait_seconds=budget.capacity_wait_seconds,
        )
        watched.section = watched.care.section = section
        if section.notify != told:
            for channel in watched.channels:
                channel.close(0.0)
            watched.channels = channels(section.notify, self._complain)
            watched.control.notifiers = [*watched.channels]
        watched.config_mark = mark

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


def _begin(name: str, what: Callable[..., object], *arguments: object) -> threading.Thread:
    """In a thread that ends with the process, also while storage keeps it."""
    thread = threading.Thread(target=what, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


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
