"""What befalls nodes, pods, jobs, the API server, storage and clocks, and what people do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from argusrl.cluster.node_health import HEALTH
from argusrl.journal.submissions import newest_submission, read_end, read_made
from faults.simulated_controllers import Controller
from faults.simulated_kubernetes import RUN, Cluster, Job


class ClusterFaults:
    """The part of a simulation that breaks things. `excuses` of the cluster counts what a submission may answer."""

    random: Random
    cluster: Cluster
    controllers: list[Controller]
    log: list[str]
    queued: bool
    with_care: bool
    stops_left: int
    patience: float  # a person may come back
    wish_is_clear: bool  # a job under an old number that ends before anybody sees it is history
    api_down_until: float

    def happens(self, chance: float) -> bool:
        return chance > 0 and self.random.random() < chance

    def befall(self) -> None:
        """Something breaks, if there is something to break."""
        job = next((job for job in self.cluster.live_jobs() if job.driver is not None and job.driver.alive), None)
        general = (self.api_goes_down, self.storage_goes_away, self.clock_jumps, self.nodes_fill_up)
        starting = next((job for job in self.cluster.live_jobs() if job.status == "Initializing"), None)
        if starting is not None and self.happens(0.3):
            self._do(lambda: self.submission_fails(starting), "submission_fails")
            return
        if job is None or self.happens(0.2):
            self._do(self.random.choice(general))
            return
        kinds: tuple[Callable[[Job], None], ...] = (
            self.node_dies, self.head_pod_dies, self.head_restarts, self.node_is_cut_off, self.head_is_cut_from_api,
            self.driver_fails, self.driver_hangs, self.driver_meets_final_code, self.operator_gives_up,
            self.false_success, self.head_is_evicted, self.operator_sleeps, self.foreigner, self.ray_stop,
        )  # fmt: skip
        if self.with_care and self.happens(0.5):
            kinds = (self.hardware_fails, self.node_is_labelled)
        kind = self.preempt if job.queued and self.happens(0.3) else self.random.choice(kinds)
        self._do(lambda: kind(job), kind.__name__)

    def _do(self, what: Callable[[], None], name: str = "") -> None:
        self.log.append(f"{self.cluster.now:.0f} {name or what.__name__}")
        what()

    def api_goes_down(self) -> None:
        self.api_down_until = self.cluster.now + self.random.uniform(5, 400)

    def storage_goes_away(self) -> None:
        until = self.cluster.now + self.random.uniform(5, 300)
        for controller in self.controllers:
            if self.happens(0.7):
                controller.away_until = until

    def clock_jumps(self) -> None:
        self.random.choice(self.controllers).wall_offset += self.random.choice((-1e5, -100.0, 100.0, 1e5))

    def node_dies(self, job: Job) -> None:
        """For good; its object lingers, or goes. A new one comes."""
        driver = job.driver
        assert driver is not None
        node = driver.pod.node
        assert node is not None
        self._lose_driver(job)
        if self.happens(0.5):
            node.ready = False
            self.cluster.soon(100, 2000, lambda: setattr(node, "there", False))
        else:
            node.there = False
        if self.happens(0.5):
            self.cluster.soon(1, 300, lambda: self._drop_head(job, recreate=self.happens(0.5)))
        self.cluster.soon(
            60, 900, lambda: self.cluster.nodes.append(type(node)(f"hyperpod-i-{self.random.getrandbits(32):08x}"))
        )
        self._operator_notices(job)

    def head_pod_dies(self, job: Job) -> None:
        self._lose_driver(job)
        self._drop_head(job, recreate=True)
        self._operator_notices(job)

    def head_restarts(self, job: Job) -> None:
        self._lose_driver(job)
        head = job.head
        if head is not None:
            head.restarts += 1
        self._operator_notices(job)

    def head_is_evicted(self, job: Job) -> None:
        self.cluster.excuses += 1
        driver = job.driver
        assert driver is not None
        driver.pod.leaving = True
        self.cluster.end_driver(job, driver, 75, finish=False)
        self.cluster.soon(1, 20, lambda: self._drop_head(job, recreate=True))
        self._operator_notices(job)

    def node_is_cut_off(self, job: Job) -> None:
        """From the API server and from storage; then it comes back."""
        driver = job.driver
        assert driver is not None
        node = driver.pod.node
        assert node is not None
        seconds = self.random.uniform(10, 900)
        node.ready = False
        driver.silent_since = self.cluster.now
        self.cluster.excuses += 1

        def back() -> None:
            node.ready = True
            if driver.alive:
                driver.silent_since = None

        self.cluster.at(seconds, back)
        if seconds > 300:
            self._operator_notices(job)

    def head_is_cut_from_api(self, job: Job) -> None:
        """A partition: the driver lives and beats, nobody else sees its node. That is no reason for anything."""
        driver = job.driver
        assert driver is not None
        node = driver.pod.node
        assert node is not None
        node.ready = False
        if self.happens(0.3):
            driver.pod.leaving = True
        self.cluster.soon(10, 280, lambda: setattr(node, "ready", True))

    def driver_fails(self, job: Job) -> None:
        self.cluster.excuses += 1
        driver = job.driver
        assert driver is not None
        again = self.happens(0.5)
        self.cluster.end_driver(job, driver, self.random.choice((1, 5, 7, 9, 11)), finish=not again)
        if again:  # the supervisor starts another one
            self.cluster.soon(0.5, 30, lambda: self.cluster.begin(job, job.cluster))

    def driver_hangs(self, job: Job) -> None:
        assert job.driver is not None
        job.driver.silent_since = self.cluster.now
        self.cluster.excuses += 1

    def driver_meets_final_code(self, job: Job) -> None:
        assert job.driver is not None
        self.cluster.end_driver(job, job.driver, self.random.choice((2, 10)))

    def operator_gives_up(self, job: Job) -> None:
        self.cluster.excuses += 1
        self.cluster.say(job, "Failed", "JobStatusCheckTimeoutExceeded", "RUNNING")
        self.cluster.at(60, lambda: self.cluster.terminate(job))

    def hardware_fails(self, job: Job) -> None:
        """Now, and perhaps again: then a reboot has not helped."""
        self.cluster.hardware_fails(job)
        if self.happens(0.7):
            self.cluster.soon(150, 600, lambda: self.cluster.hardware_fails(job))

    def node_is_labelled(self, job: Job) -> None:
        """HyperPod is about to replace the node of a worker, and does."""
        pod = next((pod for pod in job.pods if pod.kind == "worker" and pod.node is not None), None)
        node = pod.node if pod is not None else None
        if node is None or any(driver.alive and driver.pod.node is node for driver in self.cluster.drivers.values()):
            return
        node.labels = {**node.labels, HEALTH: "UnschedulablePendingReplacement"}
        self.cluster.soon(20, 200, lambda: self.cluster.replace(node))

    def submission_fails(self, job: Job) -> None:
        self.cluster.excuses += 1
        self.cluster.say(job, "Failed", "SubmissionFailed")
        self.cluster.terminate(job)

    def ray_stop(self, job: Job) -> None:
        """A person stops the job through Ray."""
        if self.stops_left and job.driver is not None:
            self.stops_left = 0
            self.cluster.end_driver(job, job.driver, 75, finish=False)
            self.cluster.stopped_at = self.cluster.now
            self.cluster.say(job, "Failed", "AppFailed", "STOPPED")

    def foreigner(self, job: Job) -> None:
        """Somebody runs the same run elsewhere for a while."""
        self.cluster.excuses += 1
        driver = self.cluster.foreign_driver()
        self.cluster.soon(100, 900, lambda: self.cluster.kill(driver))

    def nodes_fill_up(self) -> None:
        self._nodes_go(0.0)

    def _nodes_go(self, seconds: float) -> None:
        """No node is free for new pods."""

        def go() -> None:
            for node in self.cluster.nodes:
                node.full = True
            self.cluster.soon(60, 1500, come)

        def come() -> None:
            for node in self.cluster.nodes:
                node.full = False

        self.cluster.at(seconds, go)

    def operator_sleeps(self, job: Job) -> None:
        job.looked_away = True

    def false_success(self, job: Job) -> None:
        self.cluster.excuses += 1
        if self.happens(0.5):
            self._lose_driver(job)
        self.cluster.say(job, "Complete", job_status="SUCCEEDED")
        self.cluster.at(60, lambda: self.cluster.terminate(job))

    def preempt(self, job: Job) -> None:
        self.cluster.preempt(job)

    def _lose_driver(self, job: Job) -> None:
        self.cluster.excuses += 1
        self.cluster.kill(job.driver)

    def _drop_head(self, job: Job, *, recreate: bool) -> None:
        """Its pod object goes, and KubeRay makes another one, in which nobody starts the entrypoint."""
        head = job.head
        if head is None:
            return
        self.cluster.kill(job.driver)
        job.pods.remove(head)
        if recreate:

            def made() -> None:
                free = [node for node in self.cluster.nodes if node.ready and node.there]
                if job.live and not job.suspended and job.head is None and free:
                    pod = self.cluster.new_pod(job, "head")
                    pod.node, pod.phase = self.random.choice(free), "Running"
                    job.pods.append(pod)

            self.cluster.soon(5, 60, made)

    def _operator_notices(self, job: Job) -> None:
        """After 300 s without the dashboard the job is Failed; or it stays Running for ever."""
        if self.happens(0.4):
            job.looked_away = True
            return
        driver = job.driver

        def notice() -> None:
            if job.live and not job.suspended and job.driver is driver and (driver is None or not driver.alive):
                self.cluster.say(job, "Failed", "JobStatusCheckTimeoutExceeded", "RUNNING")

        self.cluster.at(300, notice)

    def person_stops(self) -> None:
        """Deletes the job, when it is clear which one and nobody is about to replace it."""
        live = list(self.cluster.live_jobs())
        number = newest_submission(RUN)
        settled = number > 0 and read_made(RUN, number) is not None and read_end(RUN, number) is None
        if len(live) != 1 or not settled or self.cluster.completed_at or self.cluster.final_at:
            return
        self.log.append(f"{self.cluster.now:.0f} person stops {live[0].name}")
        self.cluster.stopped_at = self.cluster.now
        self.cluster.delete_job(live[0].name, None, None)
        if self.happens(0.3):
            self.patience = 600.0
            self.cluster.soon(60, 600, self.person_submits_again)

    def person_submits_again(self) -> None:
        number = newest_submission(RUN)
        if list(self.cluster.live_jobs()) or read_end(RUN, number) is None:
            return
        name_number = self.random.choice((1, number + 1))
        if any(job.name.endswith(f"-s{name_number}") for job in self.cluster.jobs.values()):
            return
        self.log.append(f"{self.cluster.now:.0f} person submits s{name_number}")
        self.wish_is_clear = name_number > number
        self.cluster.stopped_at = None
        self.cluster.submit(name_number, queued=self.queued)
