"""Controllers of the simulation, and what each of them reaches of Kubernetes and HyperPod."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from argusrl.cluster.hyperpod import Instance, RepairAnswer
from argusrl.cluster.kinds import NODE, POD, RAY_JOB, SERVICE_ACCOUNT, Kind
from argusrl.cluster.kube_api import KubeError, Listing, Object, Unreachable
from argusrl.cluster.node_care import NodeCare
from argusrl.cluster.notices import Notices
from argusrl.cluster.run_control import RunControl
from argusrl.cluster.run_record import RunRecord
from argusrl.cluster.targets import RayJobTarget
from argusrl.config.cluster_sections import BudgetSection
from argusrl.config.sections import ClusterSection
from argusrl.errors import ClusterError
from faults.simulated_kubernetes import NAMESPACE, RUN, Broken, Node

if TYPE_CHECKING:
    from faults.controller_simulation import Simulation

LATEST_SECONDS = 90.0  # after which a request that got no answer may still be carried out


class Crashed(BaseException):
    """The controller that made this call is dead."""


class SimulatedApi:
    """What one controller reaches of the API server."""

    namespace = NAMESPACE

    def __init__(self, simulation: Simulation, controller: Controller) -> None:
        self.simulation, self.controller = simulation, controller
        self.listed: list[Object] = []
        self.listed_at = float("-inf")

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        cluster = self.simulation.cluster
        return self.ask("get", lambda late: cluster.get_node(name) if kind is NODE else cluster.get_job(name))

    def list(self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "") -> Listing:
        cluster = self.simulation.cluster
        if kind is POD:
            owner, node = labels.removeprefix("ray.io/cluster="), fields.removeprefix("spec.nodeName=")
            of_cluster = labels.startswith("ray.io/cluster=")
            return Listing(
                self.ask("list", lambda late: cluster.pods_of(owner) if of_cluster else cluster.all_pods(node)), "1"
            )
        assert kind is RAY_JOB
        fresh = self.ask("list", lambda late: [cluster.ray_job(job) for job in cluster.jobs.values()])
        stale = cluster.now - self.listed_at < 60 and self.simulation.happens(0.1)
        if not stale:
            self.listed, self.listed_at = fresh, cluster.now
        return Listing(self.listed, "1")

    def create(self, kind: Kind, document: Object, namespace: str | None = None) -> Object:
        self.simulation.check_manifest(document)

        def effect(late: bool) -> Object:
            if not late:
                self.simulation.check_alone(document["metadata"]["name"])
            return self.simulation.cluster.create_job(document, by_controller=True)

        return self.ask("create", effect)

    def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        grace_seconds: int | None = None,
        propagation: str = "Background",
    ) -> bool:
        if uid is None:
            raise Broken(f"{name} is deleted without a precondition")
        return self.ask("delete", lambda late: self.simulation.cluster.delete_job(name, uid, resource_version))

    def patch(self, kind: Kind, name: str, change: Object, *_: Any, **__: Any) -> Object:
        if kind is SERVICE_ACCOUNT:  # which numbers are taken; a job is never written to, its suspension above all
            return self.ask("patch", lambda late: {})
        raise Broken(f"{name} is patched: {change}")

    def ask(self, verb: str, effect: Callable[[bool], Any]) -> Any:
        simulation = self.simulation
        sent = simulation.cluster.now
        simulation.point(self.controller)
        waited = simulation.cluster.now > sent  # on its way: what was true when it was sent may not be any more
        fault = simulation.api_fault(self.controller, verb)
        if fault == "refused":
            raise Unreachable("no answer")
        if fault == "late":
            simulation.cluster.soon(1, LATEST_SECONDS, lambda: simulation.quietly(lambda: effect(True)))
            raise Unreachable("no answer yet")
        result = effect(waited)
        if fault == "twice":
            simulation.cluster.soon(0.1, LATEST_SECONDS, lambda: simulation.quietly(lambda: effect(True)))
        simulation.point(self.controller)
        if fault == "lost":
            raise Unreachable("the answer was lost")
        return result


class SimulatedHyperPod:
    """HyperPod's API as one controller reaches it."""

    def __init__(self, api: SimulatedApi) -> None:
        self.api = api

    def _node(self, instance: str) -> Node:
        return next(node for node in self.api.simulation.cluster.nodes if node.name == f"hyperpod-{instance}")

    def describe(self, instance: str) -> Instance:
        node = self.api.ask("get", lambda late: self._node(instance))
        return Instance(instance=instance, status="Running" if node.there else "NotFound")

    def events(self, instance: str, most: int) -> list[dict[str, Any]]:
        return self.api.ask("get", lambda late: [])

    def repair(self, action: str, instances: list[str]) -> list[RepairAnswer]:
        try:
            return self.api.ask("repair", lambda late: [self._repair(action, one) for one in instances])
        except KubeError as error:
            raise ClusterError(error.message) from error

    def _repair(self, action: str, instance: str) -> RepairAnswer:
        node = self._node(instance)
        self.api.simulation.check_repair(action, node)
        cluster = self.api.simulation.cluster
        accepted = cluster.reboot(node) if action == "reboot" else cluster.replace(node)
        return RepairAnswer(instance=instance, accepted=accepted, code="" if accepted else "InvalidInstanceStatus")


class Controller:
    """One controller over its lives."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self.simulation, self.number = simulation, number
        self.turn = threading.Lock()
        self.turn.acquire()
        self.offset = simulation.random.uniform(0, 1e6)  # its monotonic clock
        self.wall_offset = 0.0
        self.began = 0.0  # its last look
        self.away_until = 0.0  # storage
        self.dead = True
        self.dying = False  # at one of its next calls
        self.poll_seconds = simulation.random.choice((3.0, 5.0, 5.0, 12.0, 25.0))
        self.control: RunControl | None = None

    def start(self) -> None:
        """A new process: it remembers nothing."""
        self.dead = False
        self.offset = self.simulation.random.uniform(0, 1e6)
        threading.Thread(target=self._live, daemon=True).start()
        self.simulation.wake_at(self, 0.0)

    def _live(self) -> None:
        self.turn.acquire()
        simulation, api = self.simulation, SimulatedApi(self.simulation, self)
        self.control = RunControl(
            record=RunRecord(RUN, lambda: simulation.cluster.now >= self.away_until),
            target=RayJobTarget(api),  # type: ignore[arg-type]
            kube=api,  # type: ignore[arg-type]
            notices=Notices(RUN, wall=self.wall, host=f"controller-{self.number}"),
            limits=simulation.limits,
            clock=lambda: simulation.cluster.now + self.offset,
            wall=self.wall,
        )
        care = NodeCare(
            self.control,
            api,  # type: ignore[arg-type]
            section=ClusterSection(replace_nodes=True, budget=BudgetSection(replacements=simulation.replacements)),
            hyperpod=lambda _: SimulatedHyperPod(api),  # type: ignore[arg-type,return-value]
            clock=self.control.clock,
            wall=self.wall,
        )
        try:
            while not simulation.over:
                self.began = simulation.cluster.now
                try:
                    listed = api.list(RAY_JOB).items
                except KubeError:
                    listed = []
                self.control.reconcile(listed)
                if simulation.with_care:
                    care.look()
                simulation.pause(self, self.poll_seconds)
        except Crashed:
            pass
        except BaseException as error:
            simulation.failure = simulation.failure or error
        self.dead = True
        simulation.control.release()

    def wall(self) -> float:
        return self.simulation.cluster.now + self.wall_offset
