"""Kubernetes, KubeRay, Kueue and the driver of one run, as far as a controller can tell: on a clock of its own."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec

from argusrl.cluster.kube_api import Conflict, NotFound, Object
from argusrl.cluster.names import FOLDER_ANNOTATION, RUN_LABEL, SUBMISSION_LABEL, submission_name
from argusrl.cluster.node_health import CLUSTER_NAME, HEALTH
from argusrl.cluster.sighting import QUEUE_LABEL
from argusrl.errors import FencedError
from argusrl.journal.attempts import Heartbeat, Verdict, newest_attempt, write_verdict
from argusrl.journal.epochs import Epoch, claim_epoch, newest_epoch, renew_epoch
from argusrl.journal.node_reports import Finding, NodeReport, write_node_reports
from argusrl.journal.submissions import require_newest
from argusrl.storage.layout import RunFolder
from faults.memory_files import MemoryFiles

RUN = RunFolder(Path("/fsx/runs/maze"))
NAMESPACE = "team"
BEAT_SECONDS = 5.0
TTL_SECONDS = 60.0  # ttlSecondsAfterFinished
GPUS = 8.0


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(eq=False)
class Node:
    name: str
    ready: bool = True
    there: bool = True
    full: bool = False
    labels: dict[str, str] = field(default_factory=lambda: {CLUSTER_NAME: "ml"})
    faults: int = 0  # times that its hardware failed since it booted
    boots: int = 0  # that were asked for and happened
    reboots: int = 0  # that were accepted
    replacements: int = 0  # that were accepted


@dataclass(eq=False)
class Pod:
    name: str
    uid: str
    kind: str  # "head" | "worker"
    node: Node | None = None
    phase: str = "Pending"
    leaving: bool = False
    restarts: int = 0


@dataclass(eq=False)
class Driver:
    """What the entrypoint runs. It beats for as long as it lives and reaches storage."""

    attempt: int
    claim: Epoch
    pod: Pod
    began: float
    silent_since: float | None = None  # cut from storage, hung or dead
    alive: bool = True

    @property
    def epoch(self) -> int:
        return self.claim.number

    def beat_at(self, now: float) -> float:
        until = now if self.silent_since is None else self.silent_since
        return self.began + BEAT_SECONDS * int((until - self.began) / BEAT_SECONDS)


@dataclass(eq=False)
class Job:
    """A RayJob and what KubeRay made of it."""

    name: str
    uid: str
    document: Object
    version: int
    status: str = ""
    job_status: str = ""
    reason: str = ""
    cluster: str = ""
    pods: list[Pod] = field(default_factory=list)
    suspended: bool = False
    leaving: bool = False
    by_controller: bool = False
    driver: Driver | None = None
    looked_away: bool = False  # KubeRay has stopped to follow it: it stays Running for ever

    @property
    def live(self) -> bool:
        return not self.leaving and self.status not in ("Complete", "Failed", "ValidationFailed")

    @property
    def queued(self) -> bool:
        return QUEUE_LABEL in self.document["metadata"]["labels"]

    @property
    def head(self) -> Pod | None:
        return next((pod for pod in self.pods if pod.kind == "head"), None)


class Cluster:
    """The world without its controllers. Things happen by `at`; `advance` lets the next one happen."""

    def __init__(self, random: Random, files: MemoryFiles) -> None:
        self.random, self.files = random, files
        self.now = 1000.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count(1)
        self.jobs: dict[str, Job] = {}
        self.nodes = [Node(f"hyperpod-i-{number:08x}") for number in range(4)]
        self.goal = 3
        self.doomed = False  # no driver ever gets anywhere
        self.drivers: dict[int, Driver] = {}
        self.excuses = 0  # faults that a submission may be the answer to
        self.completed_at: float | None = None
        self.final_at: float | None = None
        self.stopped_at: float | None = None
        self.deadline_seconds = 14_400.0 + 1800.0
        self.deletes_finished = False  # KubeRay, by an option of its operator
        self.on_delete: Callable[[Job], None] = lambda job: None

    # Time.

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + seconds, next(self.numbers), what))

    def soon(self, low: float, high: float, what: Callable[[], None]) -> None:
        self.at(self.random.uniform(low, high), what)

    # The API server.

    def ray_job(self, job: Job) -> Object:
        document = job.document
        spec = {**document["spec"], **({"suspend": job.suspended} if job.queued else {})}
        metadata: Object = {
            **document["metadata"],
            "uid": job.uid,
            "resourceVersion": str(job.version),
            "namespace": NAMESPACE,
        }
        if job.leaving:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        status = {"jobDeploymentStatus": job.status, "jobStatus": job.job_status}
        status |= {"rayClusterName": job.cluster, "reason": job.reason}
        return {"metadata": metadata, "spec": spec, "status": {key: value for key, value in status.items() if value}}

    def pod(self, job_cluster: str, pod: Pod) -> Object:
        fits = pod.node is not None
        metadata: Object = {
            "name": pod.name,
            "uid": pod.uid,
            "namespace": NAMESPACE,
            "labels": {"ray.io/cluster": job_cluster, "ray.io/node-type": pod.kind},
        }
        if pod.leaving:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        condition = {"type": "PodScheduled", "status": str(fits), "reason": "" if fits else "Unschedulable"}
        return {
            "metadata": metadata,
            "spec": {"nodeName": pod.node.name} if pod.node is not None else {},
            "status": {
                "phase": pod.phase,
                "conditions": [condition],
                "containerStatuses": [{"restartCount": pod.restarts}],
            },
        }

    def get_job(self, name: str) -> Object:
        if name not in self.jobs:
            raise NotFound(f'rayjobs "{name}" not found')
        return self.ray_job(self.jobs[name])

    def get_node(self, name: str) -> Object:
        node = next((node for node in self.nodes if node.name == name and node.there), None)
        if node is None:
            raise NotFound(f'nodes "{name}" not found')
        return {
            "metadata": {"name": name, "labels": node.labels},
            "status": {"conditions": [{"type": "Ready", "status": "True" if node.ready else "Unknown"}]},
        }

    def pods_of(self, cluster: str) -> list[Object]:
        return [self.pod(cluster, pod) for job in self.jobs.values() if job.cluster == cluster for pod in job.pods]

    def all_pods(self, node: str = "") -> list[Object]:
        found = [(job, pod) for job in self.jobs.values() for pod in job.pods]
        on = [(job, pod) for job, pod in found if not node or (pod.node is not None and pod.node.name == node)]
        return [self.pod(job.cluster, pod) for job, pod in on]

    def delete_pod(self, name: str, uid: str) -> bool:
        """At once, and without its kubelet's consent: right only where that cannot matter any more."""
        for job in self.jobs.values():
            for pod in job.pods:
                if pod.name != name:
                    continue
                if pod.uid != uid:
                    raise Conflict("another pod of that name")
                node = pod.node
                replaced = node is not None and node.labels.get(HEALTH) == "UnschedulablePendingReplacement"
                fenced = job.driver is None or newest_epoch(RUN) > job.driver.epoch
                if node is not None and (node.ready or not (replaced or fenced)) and node.there:
                    raise Broken(f"pod {name} is deleted by force on a node that may be well")
                job.pods.remove(pod)
                return True
        raise NotFound(f'pods "{name}" not found')

    # HyperPod.

    def reboot(self, node: Node) -> bool:
        """Whether it was accepted. What is on it goes on until it happens."""
        if self.random.random() < 0.1:
            return False
        node.reboots += 1

        def happen() -> None:
            node.ready, node.faults = False, 0
            node.boots += 1
            self._stop_on(node)
            self.soon(60, 180, lambda: setattr(node, "ready", True))

        self.soon(5, 60, happen)
        return True

    def replace(self, node: Node) -> bool:
        """Whether it was accepted: an instance is replaced once."""
        if not node.there:
            return False
        node.replacements += 1
        node.ready = node.there = False
        self._stop_on(node)
        self.soon(300, 1800, lambda: self.nodes.append(Node(f"hyperpod-i-{self.random.getrandbits(32):08x}")))
        return True

    def _stop_on(self, node: Node) -> None:
        for driver in self.drivers.values():
            if driver.alive and driver.pod.node is node:
                self.excuses += 1
                self.kill(driver)

    def hardware_fails(self, job: Job) -> None:
        """The probe on a worker's node finds something, and tells it in the run folder with every reading."""
        pod = next((pod for pod in job.pods if pod.kind == "worker" and pod.node is not None), None)
        if pod is None or pod.node is None or job.driver is None:
            return
        node, driver, boots = pod.node, job.driver, pod.node.boots
        node.faults += 1
        kind = self.random.choice(("ecc", "device_lost"))

        def read(count: int) -> None:
            if not driver.alive or node.boots != boots or not node.there or pod not in job.pods:
                return
            found = Finding(kind=kind, cause="hardware", text="found", time=self.now, count=count)
            report = NodeReport(
                ray_node=f"{pod.name}-{boots}", address="a", head=False, pod=pod.name, node=node.name, time=self.now,
                findings=[found],
            )  # fmt: skip
            write_node_reports(RUN, driver.attempt, [report])
            self.at(30, lambda: read(count + (kind == "device_lost")))

        read(1)

    def create_job(self, document: Object, *, by_controller: bool) -> Object:
        name = document["metadata"]["name"]
        if name in self.jobs:
            raise Conflict(f'rayjobs "{name}" already exists')
        job = Job(name, f"uid-{next(self.numbers)}", document, next(self.numbers), by_controller=by_controller)
        self.jobs[name] = job
        if job.queued:
            job.suspended = True
            self.soon(1, 60, lambda: self.admit(job))
        else:
            self.soon(1, 3, lambda: self.bring_up(job))
        return self.ray_job(job)

    def delete_job(self, name: str, uid: str | None, version: str | None) -> bool:
        job = self.jobs.get(name)
        if job is None:
            raise NotFound(f'rayjobs "{name}" not found')
        if (uid is not None and uid != job.uid) or (version is not None and version != str(job.version)):
            raise Conflict("the object has changed")
        if not job.leaving:
            self.on_delete(job)
            job.leaving = True
            job.version = next(self.numbers)
            self.terminate(job)
            self.soon(1, 40, lambda: self.forget(job))
        return True

    def forget(self, job: Job) -> None:
        if self.jobs.get(job.name) is job:
            del self.jobs[job.name]

    # KubeRay and Kueue.

    def say(self, job: Job, status: str, reason: str = "", job_status: str = "") -> None:
        job.status, job.reason, job.job_status = status, reason, job_status
        job.version = next(self.numbers)
        if status in ("Complete", "Failed") and self.deletes_finished:
            self.soon(TTL_SECONDS, TTL_SECONDS + 8, lambda: self.tidy(job))

    def tidy(self, job: Job) -> None:
        """KubeRay deletes a job that is over. Where no controller has seen it, nobody can tell who did that."""
        seen = self.files.lines.get(str(RUN.controller_events), ())
        number = int(job.document["metadata"]["labels"][SUBMISSION_LABEL])
        if any(line["kind"] == "job_over" and line["submission"] == number for line in seen):
            self.forget(job)

    def admit(self, job: Job) -> None:
        if job.live and job.suspended:
            job.suspended = False
            job.version = next(self.numbers)
            self.soon(1, 3, lambda: self.bring_up(job))

    def preempt(self, job: Job) -> None:
        job.suspended = True
        self.say(job, "Suspending")
        self.terminate(job)

        def suspended() -> None:
            if job.live and job.suspended:
                job.cluster, job.pods = "", []
                self.say(job, "Suspended")
                self.soon(30, 600, lambda: self.admit(job))

        self.soon(1, 20, suspended)

    def bring_up(self, job: Job) -> None:
        if not job.live or job.suspended:
            return
        job.cluster = f"{job.name}-{next(self.numbers)}"
        job.driver = None
        self.say(job, "Initializing")
        job.pods = [self.new_pod(job, "head"), self.new_pod(job, "worker")]
        self.schedule(job)
        cluster = job.cluster
        self.at(self.deadline_seconds, lambda: self.deadline(job, cluster))

    def deadline(self, job: Job, cluster: str) -> None:
        if job.live and job.cluster == cluster and job.status == "Initializing":
            self.excuses += 1
            self.say(job, "Failed", "PreRunningDeadlineExceeded")
            self.terminate(job)

    def new_pod(self, job: Job, kind: str) -> Pod:
        number = next(self.numbers)
        return Pod(f"{job.cluster}-{kind}-{number}", f"pod-{number}", kind)

    def schedule(self, job: Job) -> None:
        """Pods go to nodes that are well; where there is none, they wait."""
        if not job.live or job.suspended or job.status != "Initializing":
            return
        free = [node for node in self.nodes if node.ready and node.there and not node.full]
        for pod in job.pods:
            if pod.node is None and free:
                pod.node = self.random.choice(free)
        if all(pod.node is not None for pod in job.pods):
            self.soon(5, 60, lambda cluster=job.cluster: self.running(job, cluster))
        else:
            self.at(20, lambda: self.schedule(job))

    def running(self, job: Job, cluster: str) -> None:
        if not job.live or job.cluster != cluster or job.status != "Initializing":
            return
        for pod in job.pods:
            if pod.node is None or not (pod.node.ready and pod.node.there):
                pod.node = None
        if any(pod.node is None for pod in job.pods):
            self.schedule(job)
            return
        for pod in job.pods:
            pod.phase = "Running"
        self.say(job, "Running", job_status="RUNNING")
        self.soon(1, 10, lambda: self.begin(job, cluster))

    def terminate(self, job: Job) -> None:
        """Its pods get SIGTERM: the driver seals and says so, where it can."""
        driver = job.driver
        for pod in job.pods:
            pod.leaving = True
        if driver is None or not driver.alive:
            return
        node = driver.pod.node
        if node is not None and node.ready and node.there:
            self.soon(0.5, 8, lambda: self.end_driver(job, driver, 75, finish=False))

    # The driver.

    def begin(self, job: Job, cluster: str) -> None:
        """The supervisor starts a driver."""
        head = job.head
        if not job.live or job.cluster != cluster or job.status != "Running" or head is None or head.leaving:
            return
        if job.driver is not None and job.driver.alive:
            return
        if self.completed_at is not None:
            self.finish(job, 0)
            return
        number = int(job.document["metadata"]["labels"][SUBMISSION_LABEL])
        attempt = newest_attempt(RUN) + 1
        self.files.folders.setdefault(str(RUN.attempts), {})[f"{attempt:03d}"] = b""
        try:
            require_newest(RUN, number)
            epoch = claim_epoch(RUN, {"attempt": attempt})
            require_newest(RUN, number)
        except FencedError:
            self.write_verdict(attempt, 8)
            self.finish(job, 8)
            return
        driver = Driver(attempt, epoch, head, self.now)
        job.driver = self.drivers[attempt] = driver
        self.soon(20, 70, lambda: self.step(job, driver))

    def foreign_driver(self) -> Driver:
        """One that no job knows; it takes the run."""
        attempt = newest_attempt(RUN) + 1
        self.files.folders.setdefault(str(RUN.attempts), {})[f"{attempt:03d}"] = b""
        epoch = claim_epoch(RUN, {"attempt": attempt})
        driver = Driver(attempt, epoch, Pod("elsewhere", "elsewhere", "head"), self.now)
        self.drivers[attempt] = driver
        return driver

    def step(self, job: Job, driver: Driver) -> None:
        if not driver.alive:
            return
        if driver.silent_since is not None:
            self.soon(5, 20, lambda: self.step(job, driver))
            return
        if newest_epoch(RUN) > driver.epoch:
            self.end_driver(job, driver, 8)
            return
        if self.random.random() < 0.1:
            self.heal(driver)
        if self.doomed:
            self.excuses += 1
            self.end_driver(job, driver, 9)
            return
        commits = self.files.folders.setdefault(str(RUN.commits), {})
        commits[f"{len(commits) + 1:06d}.json"] = b""
        if len(commits) >= self.goal:
            self.end_driver(job, driver, 0)
        else:
            self.soon(20, 70, lambda: self.step(job, driver))

    def heal(self, driver: Driver) -> None:
        """It gets another worker, under another epoch of its own."""
        driver.claim = renew_epoch(driver.claim, {"attempt": driver.attempt})

    def gpu_hours(self) -> float:
        """That all drivers have spent so far."""
        return GPUS * sum(one.beat_at(self.now) - one.began for one in self.drivers.values()) / 3600

    def end_driver(self, job: Job, driver: Driver, code: int, *, finish: bool = True) -> None:
        if not driver.alive:
            return
        if driver.silent_since is None:
            self.write_verdict(driver.attempt, code)
        self.kill(driver)
        if finish and job.driver is driver:
            self.finish(job, code)

    def kill(self, driver: Driver | None) -> None:
        if driver is not None and driver.alive:
            driver.alive = False
            driver.silent_since = self.now if driver.silent_since is None else driver.silent_since

    def write_verdict(self, attempt: int, code: int) -> None:
        outcome = "complete" if code == 0 else "interrupted" if code == 75 else "failed"
        write_verdict(RUN, attempt, Verdict(outcome=outcome, exit_code=code, reason="", time=self.now))
        if code == 0:
            self.completed_at = self.now
        if code in (2, 10) and attempt == newest_attempt(RUN):
            self.final_at = self.now

    def finish(self, job: Job, code: int) -> None:
        """KubeRay hears of the end of the entrypoint, if it still follows the job."""
        if job.looked_away:
            return

        def done() -> None:
            if not job.live or job.suspended:
                return
            if code == 0:
                self.say(job, "Complete", job_status="SUCCEEDED")
            else:
                self.say(job, "Failed", "AppFailed", "FAILED")
            self.at(60, lambda: job.pods.clear())

        self.soon(1, 8, done)

    def heartbeat(self, _: RunFolder, attempt: int) -> Heartbeat | None:
        driver = self.drivers.get(attempt)
        if driver is None:
            return None
        return Heartbeat(
            time=driver.beat_at(self.now), pid=1, host=driver.pod.name, epoch=driver.epoch, step=0, phase="train"
        )

    # A person.

    def submit(self, number: int, *, queued: bool) -> Job:
        labels = {RUN_LABEL: "maze", SUBMISSION_LABEL: str(number)}
        if queued:
            labels[QUEUE_LABEL] = "team-queue"
        template = {"metadata": {"labels": {SUBMISSION_LABEL: str(number)}}, "spec": {"containers": []}}
        worker = msgspec.convert(template, dict)
        worker["spec"] = {"containers": [{"resources": {"limits": {"nvidia.com/gpu": str(int(GPUS))}}}]}
        document = {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": {
                "name": submission_name("maze", number),
                "labels": labels,
                "annotations": {FOLDER_ANNOTATION: str(RUN.path)},
            },
            "spec": {
                "shutdownAfterJobFinishes": True,
                "ttlSecondsAfterFinished": int(TTL_SECONDS),
                "rayClusterSpec": {
                    "headGroupSpec": {"template": template},
                    "workerGroupSpecs": [{"replicas": 1, "template": worker}],
                },
            },
        }
        self.create_job(document, by_controller=False)
        return self.jobs[submission_name("maze", number)]

    def live_jobs(self) -> Iterable[Job]:
        return [job for job in self.jobs.values() if job.live]
