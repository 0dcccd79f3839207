"""Pods as raylets: the parts of KubeRay, the scheduler, kubelets and HyperPod that a recovery meets, in small.

Objects live in the API server of the tests; what a pod would run is run on this machine. A RayJob gets a head pod and
worker pods; a pod is bound to a free node, its Ray is started, and when all are there the job's entrypoint starts in
the head pod. A pod that is deleted gets its preStop hook and then SIGKILL; one whose process ended has failed,
and a worker is made anew. A node that is lost takes everything on it along.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argusrl.cluster.kinds import CONFIG_MAP, NODE, POD, RAY_CLUSTER, RAY_JOB
from argusrl.cluster.manifests.recipe import RECIPE
from argusrl.cluster.manifests.setup import RECIPE_FOLDER
from argusrl.cluster.sighting import CLUSTER_LABEL, NODE_TYPE_LABEL
from e2e.cluster_of_raylets import Node, RayletCluster
from e2e.conftest import ROOT, command
from fakes.kubernetes_api import ApiError, Store

HEALTH = "sagemaker.amazonaws.com/node-health-status"
GROUP = "sagemaker.amazonaws.com/instance-group-name"
REPLACE = "UnschedulablePendingReplacement"
_LOOK_SECONDS = 0.1
_PATIENCE_SECONDS = 90.0

Object = dict[str, Any]


@dataclass
class _Pod:
    """What a pod runs here."""

    name: str
    head: bool
    ray: Node | None = None
    ending: Future[None] | None = None


@dataclass
class _Job:
    """What a RayJob runs here."""

    uid: str
    name: str
    cluster: str
    raylets: RayletCluster
    head: Future[None] | None = None
    driver: subprocess.Popen[bytes] | None = None
    pods: dict[str, _Pod] = field(default_factory=dict)
    made: int = 0


@dataclass
class PodsAsRaylets:
    """Use as a context manager. `replace_seconds` is how long HyperPod takes from the label to the loss of the node."""

    store: Store
    folder: Path
    replace_seconds: float = 8.0
    jobs: dict[str, _Job] = field(default_factory=dict)
    labelled: dict[str, float] = field(default_factory=dict)  # monotonic
    lost: dict[str, float] = field(default_factory=dict)  # node → seconds since 1970
    ran: dict[str, float] = field(default_factory=dict)  # pod → seconds since 1970
    error: BaseException | None = None
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> PodsAsRaylets:
        self.store.kubelets = False
        self._thread = threading.Thread(target=self._work, name="pods", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(30)
        for job in self.jobs.values():
            if job.driver is not None and job.driver.poll() is None:
                job.driver.kill()
            if job.head is not None:
                with suppress(Exception):
                    job.head.result(60)
            job.raylets.__exit__()
        self._threads.shutdown(wait=True, cancel_futures=True)

    # ---- what a test does

    def add_node(self, group: str = "workers") -> str:
        """A node of HyperPod joins."""
        name = f"hyperpod-i-{uuid.uuid4().hex[:17]}"
        self.store.seed(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "labels": {HEALTH: "Schedulable", GROUP: group}},
                "spec": {},
                "status": {"conditions": [{"type": "Ready", "status": "True"}]},
            }
        )
        return name

    def label(self, node: str) -> None:
        """HyperPod is about to replace a node."""
        self.labelled[node] = time.monotonic()
        taint = {"key": HEALTH, "value": "Unschedulable", "effect": "NoSchedule"}
        self.store.patch(NODE, node, {"metadata": {"labels": {HEALTH: REPLACE}}, "spec": {"taints": [taint]}})

    def lose(self, node: str) -> None:
        """The machine is gone: its kubelet says nothing any more."""
        with self.store.lock:
            self.store.dead_nodes.add(node)
            self.lost[node] = time.time()
        for job, pod in self._on(node):
            self._kill(job, pod)
        with suppress(ApiError):
            self.store.patch(
                NODE, node, {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}, sub="status"
            )

    def running(self, *, head: bool) -> Object:
        """A running head or worker pod, the newest one."""
        kind = "head" if head else "worker"
        pods = [pod for pod in self.store.objects(POD) if pod["metadata"]["labels"][NODE_TYPE_LABEL] == kind]
        return [pod for pod in pods if pod["status"]["phase"] == "Running"][-1]

    def node_of(self, *, head: bool) -> str:
        """The node of `running`."""
        return str(self.running(head=head)["spec"]["nodeName"])

    def evict(self, *, head: bool) -> None:
        """Kubernetes ends a pod with all its grace: kubectl drain, preemption, a spot reclaim."""
        self.store.evict(self.running(head=head)["metadata"]["name"], "default")

    # ---- the loop

    def _work(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            try:
                self._look()
            except ApiError:  # somebody changed it meanwhile: look again
                continue
            except BaseException as error:
                self.error = error
                raise

    def _look(self) -> None:
        for found in self.store.objects(RAY_JOB):
            if found["metadata"]["uid"] not in self.jobs:
                self._accept(found)
        for job in list(self.jobs.values()):
            self._follow(job)
        for node, since in list(self.labelled.items()):
            if time.monotonic() - since > self.replace_seconds:
                del self.labelled[node]
                self._threads.submit(self.replace, node)

    def replace(self, node: str) -> None:
        """HyperPod takes a node away, if it is not lost already, and brings another one."""
        if node not in self.lost:
            self.lose(node)
        group = self.store.get(NODE, node)["metadata"]["labels"][GROUP]
        self.store.delete(NODE, node)
        for job, pod in self._on(node):  # the pod collector removes what was on a node that is no more
            with suppress(ApiError):
                self.store.delete(POD, pod.name, "default", grace_seconds=0)
            job.pods.pop(pod.name, None)
        self.add_node(group)

    def _accept(self, found: Object) -> None:
        """A RayCluster and its pods."""
        meta = found["metadata"]
        name = f"{meta['name']}-raycluster"
        owner = {"apiVersion": "ray.io/v1", "kind": "RayJob", "name": meta["name"], "uid": meta["uid"]}
        raylets = RayletCluster()
        self.jobs[meta["uid"]] = _Job(meta["uid"], meta["name"], name, raylets)
        spec = found["spec"]["rayClusterSpec"]
        body = {"metadata": {"name": name, "ownerReferences": [owner]}, "spec": spec}
        self.store.create(RAY_CLUSTER, body, "default")
        self._status(found, jobDeploymentStatus="Initializing", rayClusterName=name)

    def _status(self, found: Object, **status: str) -> None:
        self.store.patch(RAY_JOB, found["metadata"]["name"], {"status": status}, "default", sub="status")

    def _follow(self, job: _Job) -> None:
        found = next((one for one in self.store.objects(RAY_JOB) if one["metadata"]["uid"] == job.uid), None)
        pods = {pod["metadata"]["name"]: pod for pod in self.store.objects(POD)}
        own = {name: pod for name, pod in pods.items() if pod["metadata"]["labels"].get(CLUSTER_LABEL) == job.cluster}
        over = found is not None and (found.get("status") or {}).get("jobDeploymentStatus") in ("Complete", "Failed")
        if found is not None and not over and "deletionTimestamp" not in found["metadata"]:
            self._make_missing(job, found, own)
        for name, pod in own.items():
            self._kubelet(job, job.pods.setdefault(name, _Pod(name, _is_head(pod))), pod)
        if found is not None and not over:
            self._entrypoint(job, found, own)

    def _make_missing(self, job: _Job, found: Object, own: dict[str, Object]) -> None:
        """KubeRay: pods that are being deleted still count."""
        spec = found["spec"]["rayClusterSpec"]
        for name, pod in list(own.items()):
            if pod["status"]["phase"] == "Failed" and not _is_head(pod) and "deletionTimestamp" not in pod["metadata"]:
                self.store.delete(POD, name, "default", grace_seconds=0)
                del own[name]
        heads = [pod for pod in own.values() if _is_head(pod)]
        if not heads and job.head is None:
            self._make_pod(job, spec["headGroupSpec"]["template"], "head")
        group = spec["workerGroupSpecs"][0]
        for _ in range(group["replicas"] - (len(own) - len(heads))):
            self._make_pod(job, group["template"], "worker")

    def _make_pod(self, job: _Job, template: Object, kind: str) -> None:
        job.made += 1
        cluster = self.store.get(RAY_CLUSTER, job.cluster, "default")["metadata"]
        owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": job.cluster, "uid": cluster["uid"]}
        labels = {**template["metadata"]["labels"], CLUSTER_LABEL: job.cluster, NODE_TYPE_LABEL: kind}
        meta = {**template["metadata"], "name": f"{job.cluster}-{kind}-{job.made}", "labels": labels}
        meta["ownerReferences"] = [owner]
        self.store.create(POD, {"metadata": meta, "spec": template["spec"]}, "default")

    # ---- a kubelet

    def _kubelet(self, job: _Job, here: _Pod, pod: Object) -> None:
        node = pod["spec"].get("nodeName")
        if node in self.store.dead_nodes:
            return
        if "deletionTimestamp" in pod["metadata"]:
            if here.ending is None:
                here.ending = self._threads.submit(self._end, job, here, pod)
        elif node is None:
            self._bind(here, pod)
        elif here.ray is None and pod["status"]["phase"] == "Pending":
            self._run(job, here, pod)
        elif here.ray is not None and here.ray.process.poll() is not None and pod["status"]["phase"] == "Running":
            here.ray.lose()
            self._phase(here.name, "Failed")

    def _bind(self, here: _Pod, pod: Object) -> None:
        taken = {
            one["spec"].get("nodeName")
            for one in self.store.objects(POD)
            if one["status"]["phase"] not in ("Failed", "Succeeded")
        }
        group = "head" if here.head else "workers"
        for node in self.store.objects(NODE):
            labels, name = node["metadata"]["labels"], node["metadata"]["name"]
            well = labels[HEALTH] == "Schedulable" and name not in self.store.dead_nodes
            if well and labels[GROUP] == group and name not in taken:
                self.store.patch(POD, here.name, {"spec": {"nodeName": name}}, "default")
                return
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node is free"}
        if not pod["status"].get("conditions"):
            self.store.patch(POD, here.name, {"status": {"conditions": [condition]}}, "default", sub="status")

    def _run(self, job: _Job, here: _Pod, pod: Object) -> None:
        if here.head:
            if job.head is None:
                job.raylets.head_variables = self.variables(pod)
                job.head = self._threads.submit(_started, job.raylets)
            elif job.head.done():
                job.head.result()
                here.ray = job.raylets.nodes[0]
                self._phase(here.name, "Running")
        elif job.raylets.address:
            here.ray = job.raylets.add(**self.variables(pod))
            self._phase(here.name, "Running")

    def variables(self, pod: Object) -> dict[str, str]:
        """The environment that the manifest gives a pod, as far as it does not describe machines."""
        meta, found = pod["metadata"], {}
        fields = {
            "metadata.name": meta["name"],
            "metadata.namespace": "default",
            "spec.nodeName": pod["spec"].get("nodeName", ""),
            "status.podIP": "127.0.0.1",
            "status.hostIP": "127.0.0.1",
        } | {f"metadata.labels['{name}']": value for name, value in meta["labels"].items()}
        for item in pod["spec"]["containers"][0]["env"]:
            path = item.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            if path is not None:
                found[item["name"]] = fields[path]
            elif item["name"].startswith("ARGUSRL_"):
                found[item["name"]] = item["value"]
        return found

    def _phase(self, name: str, phase: str) -> None:
        status: Object = {"phase": phase}
        if phase == "Running":
            self.ran[name] = time.time()
            status["containerStatuses"] = [{"name": "ray", "restartCount": 0, "ready": True}]
        self.store.patch(POD, name, {"status": status}, "default", sub="status")

    def _end(self, job: _Job, here: _Pod, pod: Object) -> None:
        """The preStop hook, then the end of everything in the pod."""
        if here.ray is not None and here.ray.process.poll() is None:
            hook = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            with (self.folder / f"{here.name}.hook.log").open("wb") as log:
                subprocess.run(
                    command(*hook[1:]),
                    cwd=ROOT,
                    env={**job.raylets.environment, **self.variables(pod)},
                    stdout=log,
                    stderr=log,
                    timeout=_PATIENCE_SECONDS,
                    check=False,
                )
        self._kill(job, here)
        self.store.finish_pods(here.name)

    def _kill(self, job: _Job, here: _Pod) -> None:
        if here.head and job.driver is not None and job.driver.poll() is None:
            job.driver.kill()
        if here.ray is not None:
            here.ray.lose()

    def _on(self, node: str) -> list[tuple[_Job, _Pod]]:
        names = {pod["metadata"]["name"] for pod in self.store.objects(POD) if pod["spec"].get("nodeName") == node}
        return [(job, pod) for job in self.jobs.values() for pod in job.pods.values() if pod.name in names]

    # ---- the job

    def _entrypoint(self, job: _Job, found: Object, own: dict[str, Object]) -> None:
        head = next((job.pods[name] for name, pod in own.items() if _is_head(pod)), None)
        if job.driver is None:
            if own and all(pod["status"]["phase"] == "Running" for pod in own.values()):
                pod = next(pod for pod in own.values() if _is_head(pod))
                job.driver = self._start_driver(job, found, pod)
                self._status(found, jobDeploymentStatus="Running", jobStatus="RUNNING")
            return
        code = job.driver.poll()
        if code is None or head is None or head.ray is None or head.ray.process.poll() is not None:
            return
        if own[head.name]["spec"]["nodeName"] in self.store.dead_nodes:
            return  # a head that is gone cannot say how its job ended
        if code == 0:
            self._status(found, jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
        else:
            self._status(found, jobDeploymentStatus="Failed", jobStatus="FAILED", reason="AppFailed")

    def _start_driver(self, job: _Job, found: Object, pod: Object) -> subprocess.Popen[bytes]:
        recipe = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "recipe")
        texts = self.store.get(CONFIG_MAP, recipe["configMap"]["name"], "default")["data"]
        folder = self.folder / job.name
        for item in recipe["configMap"]["items"]:
            path = folder / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[item["key"]])
        assert found["spec"]["entrypoint"] == f"argusrl train {RECIPE_FOLDER / RECIPE}"
        head = job.raylets.nodes[0]
        with (self.folder / f"{job.name}.driver.log").open("wb") as log:
            return subprocess.Popen(
                command("train", folder / RECIPE),
                cwd=ROOT,
                env={
                    **job.raylets.environment,
                    **self.variables(pod),
                    **head.mark,
                    "RAY_ADDRESS": job.raylets.address,
                },
                stdout=log,
                stderr=log,
            )


def _is_head(pod: Object) -> bool:
    return bool(pod["metadata"]["labels"].get(NODE_TYPE_LABEL) == "head")


def _started(raylets: RayletCluster) -> None:
    raylets.__enter__()


def tail(path: Path, characters: int = 3000) -> str:
    """The end of a log, for messages."""
    return path.read_text(errors="replace")[-characters:] if path.exists() else f"{os.fspath(path)}: nothing"
