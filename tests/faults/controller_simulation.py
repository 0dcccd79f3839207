"""One seed: a run on a simulated cluster, two controllers, and what befalls nodes, pods, jobs, API and clocks.

Controllers run in threads, one at a time. At every request and every write to the run folder the seed decides who goes
on: a controller may be interrupted for a moment or for minutes, or die. Nothing sleeps; time is the next event's.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from argusrl.cluster import run_record
from argusrl.cluster.kube_api import KubeError, Object
from argusrl.cluster.node_health import HEALTH
from argusrl.cluster.observation import Limits
from argusrl.cluster.sighting import by_controller
from argusrl.journal import epochs
from argusrl.journal.epochs import newest_epoch
from argusrl.journal.submissions import newest_submission, read_end, submissions
from faults.cluster_faults import ClusterFaults
from faults.memory_files import MemoryFiles, in_memory
from faults.simulated_controllers import LATEST_SECONDS, Controller, Crashed
from faults.simulated_kubernetes import RUN, Broken, Cluster, Job, Node

MOST_SECONDS = 6 * 3600.0  # a run that has not ended by then, with nothing in its way, is lost
LONGEST_PAUSE_SECONDS = 120.0
LATE_GPU_HOURS = 3.0  # spent while nobody could see or reach the run
_FAULTS = {  # what may become of a request
    **dict.fromkeys(("get", "list"), ("refused", "lost")),
    **dict.fromkeys(("create", "delete"), ("refused", "lost", "late", "twice")),
    **dict.fromkeys(("patch", "repair"), ("refused", "lost", "late")),
}


class Simulation(ClusterFaults):
    """`play` raises Broken, or whatever the code under test should not raise."""

    def __init__(self, seed: int, files: MemoryFiles) -> None:
        self.random = Random(seed)
        self.files = files
        self.cluster = Cluster(self.random, files)
        files.touched = self.touched
        files.away = lambda: self.current is not None and self.cluster.now < self.current.away_until
        files.folders["/fsx/runs"] = {"maze": b""}
        self.control = threading.Lock()
        self.control.acquire()
        self.current: Controller | None = None
        self.over = False
        self.failure: BaseException | None = None
        self.faults_left = self.random.choice((0, 1, 1, 2, 3, 4, 6, 10))
        self.nuisance = self.random.choice((0.0, 0.0, 0.01, 0.05))  # of API calls that go wrong
        self.switching = self.random.choice((0.02, 0.1, 0.3))
        self.deaths_left = self.random.choice((0, 0, 1, 2, 4))
        self.calm_at = self.random.uniform(300, 2400)
        self.api_down_until = 0.0
        self.limits = Limits(
            resubmissions=self.random.choice((20, 20, 20, 3)),
            gpu_hours=self.random.choice((None, None, None, self.random.uniform(0.5, 4.0))),
        )
        self.queued = self.random.random() < 0.3
        self.cluster.goal = self.random.randint(1, max(2, int(self.calm_at / 40)))
        self.cluster.doomed = self.happens(0.1)
        self.cluster.deletes_finished = self.happens(0.3)
        if self.happens(0.3):
            self.cluster.deadline_seconds = 600.0
        self.cluster.on_delete = self.check_delete
        self.with_care = self.happens(0.2)
        self.replacements = self.random.choice((1, 4))
        self.stops_left = self.random.choice((0, 0, 0, 1))
        self.wish_is_clear = True
        self.overtaken = False  # a person stopped the run while it was about to be submitted again: it goes on
        self.controllers = [Controller(self, number) for number in range(2)]
        self.log: list[str] = []
        self.settled_at: float | None = None
        self.patience = 0.0

    def play(self) -> None:
        cluster = self.cluster
        cluster.soon(0, 30, lambda: cluster.submit(1, queued=self.queued))
        for controller in self.controllers:
            cluster.soon(0, 30, controller.start)
        for _ in range(self.faults_left):
            cluster.soon(10, self.calm_at, self.befall)
        if self.happens(0.1):
            self._nodes_go(self.random.uniform(0, 60))
        for _ in range(self.deaths_left):
            cluster.soon(10, self.calm_at, lambda: setattr(self.random.choice(self.controllers), "dying", True))
        if self.stops_left:
            cluster.soon(10, self.calm_at, self.person_stops)
        end = cluster.now + MOST_SECONDS
        while cluster.queue and cluster.now < end and self.failure is None and not self._resolved():
            time, _, what = heapq.heappop(cluster.queue)
            cluster.now = max(cluster.now, time)
            what()
        self.finish()

    def finish(self) -> None:
        self.over = True
        for controller in self.controllers:
            while not controller.dead:
                self._resume(controller)
        if self.failure is not None:
            raise self.failure
        self.check_end()

    # The scheduler.

    def wake_at(self, controller: Controller, seconds: float) -> None:
        self.cluster.at(seconds, lambda: self._resume(controller))

    def _resume(self, controller: Controller) -> None:
        if controller.dead:
            return
        self.current = controller
        controller.turn.release()
        self.control.acquire()
        self.current = None
        if controller.dead and not self.over:
            self.cluster.soon(1, 60, controller.start)

    def pause(self, controller: Controller, seconds: float) -> None:
        """Called by a controller: others go on."""
        if self.over:
            raise Crashed
        self.wake_at(controller, seconds)
        self.control.release()
        controller.turn.acquire()
        self.current = controller
        if self.over:
            raise Crashed

    def point(self, controller: Controller) -> None:
        """A controller may be interrupted here, or die."""
        if self.over or (controller.dying and self.happens(0.2)):
            controller.dying = False
            raise Crashed
        if self.happens(self.switching):
            long = self.cluster.now < 1000 + self.calm_at and self.happens(0.03)
            self.pause(controller, self.random.uniform(1, LONGEST_PAUSE_SECONDS) if long else self.random.uniform(0, 2))

    @property
    def calm(self) -> bool:
        return self.cluster.now > 1000 + self.calm_at

    def api_fault(self, controller: Controller, verb: str) -> str:
        if self.cluster.now < self.api_down_until:
            return "refused"
        if self.calm or not self.happens(self.nuisance):
            return ""
        return self.random.choice(_FAULTS[verb])

    @staticmethod
    def quietly(effect: Callable[[], Any]) -> None:
        try:
            effect()
        except KubeError:
            return

    def touched(self, path: Path, done: bool) -> None:
        if self.current is None:
            return
        if done and path.parent == RUN.submissions:
            self.check_record(path, self.current)
        self.point(self.current)

    # What must hold.

    def broken(self, what: str) -> Broken:
        return Broken(f"{what}; {'; '.join(self.log)}")

    def check_manifest(self, document: Object) -> None:
        if "suspend" in document["spec"] or not by_controller(document):
            raise self.broken("spec.suspend is not the controller's, and what it creates is marked")

    def check_alone(self, name: str) -> None:
        others = [job.name for job in self.cluster.live_jobs() if job.name != name]
        if others and name not in self.cluster.jobs:
            raise self.broken(f"{name} is created beside {others}")

    def check_record(self, path: Path, controller: Controller) -> None:
        """An intent was recorded: by what its controller could see when its look began it must have been wanted."""
        record = self.files.read_sealed(path)
        if record.get("reason") in ("first", "person") or "manifest" not in record:
            return
        for what, since in (
            ("complete", self.cluster.completed_at),
            ("ended for good", self.cluster.final_at),
            ("stopped", None if self.overtaken else self.cluster.stopped_at),
        ):
            if since is not None and since < controller.began:
                raise self.broken(f"{record['name']} is wanted for a run that was {what} at {since:.0f}")
        self.overtaken = self.cluster.stopped_at is not None

    def check_repair(self, action: str, node: Node) -> None:
        """A reboot happens once, a replacement after it, for something new, within the budget."""
        asked = sum(one.reboots + one.replacements for one in self.cluster.nodes if HEALTH not in one.labels)
        again = action == "replace" and not node.there
        if action == "reboot" and (node.reboots or not node.faults):
            raise self.broken(f"{node.name} is rebooted again")
        if action == "replace" and not again and not (node.boots and node.faults):
            raise self.broken(f"{node.name} is replaced for what it was rebooted for, or without a reboot")
        if asked >= self.replacements and not again and HEALTH not in node.labels:
            raise self.broken(f"{node.name}: more repairs than the budget of {self.replacements}")

    def check_delete(self, job: Job) -> None:
        if self.current is None or job.driver is None or not job.driver.alive:
            return
        number = newest_submission(RUN)
        ended = read_end(RUN, number) is not None
        newer = any(other is not job and other.live and not other.by_controller for other in self.cluster.jobs.values())
        if newest_epoch(RUN) <= job.driver.epoch and not ended and not newer:
            raise self.broken(f"{job.name} is deleted while its driver lives, unfenced")

    def _resolved(self) -> bool:
        """Whether the run has come to its end, and for long enough that no late request changes anything."""
        number = newest_submission(RUN)
        settled = bool(number) and read_end(RUN, number) is not None and not list(self.cluster.live_jobs())
        if not settled:
            self.settled_at = None
        elif self.settled_at is None:
            self.settled_at = self.cluster.now
        return self.settled_at is not None and self.cluster.now > self.settled_at + 2 * LATEST_SECONDS + self.patience

    def check_end(self) -> None:
        cluster, number = self.cluster, newest_submission(RUN)
        end = read_end(RUN, number) if number else None
        made = submissions(RUN)
        again = sum(one.by_controller for one in made)
        story = ", ".join(f"s{one.number} {one.reason}" for one in made)
        live = [job.name for job in cluster.live_jobs()]
        if again > cluster.excuses:
            raise self.broken(f"{again} submissions for {cluster.excuses} faults: {story}")
        if end is None:
            raise self.broken(f"lost: no end after {MOST_SECONDS:.0f} s: {story}; live: {live}")
        if live:
            raise self.broken(f"{live} live on after the end {end.reason}: {story}")
        right = {
            "complete": cluster.completed_at is not None,
            "final_code": cluster.final_at is not None,
            "vanished": cluster.stopped_at is not None or not self.wish_is_clear,
            "job_stopped": cluster.stopped_at is not None,
            "resubmissions_spent": again >= self.limits.resubmissions,
            "futile": again >= 2,
            "gpu_hours_spent": cluster.gpu_hours() >= (self.limits.gpu_hours or math.inf) - 1e-6,
        }
        if cluster.gpu_hours() > (self.limits.gpu_hours or math.inf) + LATE_GPU_HOURS:
            raise self.broken(f"{cluster.gpu_hours():.1f} GPU-hours of {self.limits.gpu_hours}: {story}")
        if not right.get(end.reason, False):
            raise self.broken(f"ended by {end.reason} without reason: {story}")


@contextmanager
def simulated_run(seed: int) -> Iterator[Simulation]:
    """A simulation in a run folder of its own."""
    files = MemoryFiles()
    with in_memory(files) as patch:
        simulation = Simulation(seed, files)
        patch.setattr(run_record, "read_heartbeat", simulation.cluster.heartbeat)
        patch.setattr(epochs, "time", SimpleNamespace(time=lambda: simulation.cluster.now))
        yield simulation


def simulate(seed: int) -> Simulation:
    """Play one seed. Raises Broken."""
    with simulated_run(seed) as simulation:
        simulation.play()
        return simulation
