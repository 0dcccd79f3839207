"""A run of the reference recipe on a cluster in memory: KubeRay, kubelets and the driver do what a test says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argusrl.cluster.kinds import NODE, POD, RAY_JOB
from argusrl.cluster.kube_api import Object
from argusrl.cluster.manifests.render import render
from argusrl.cluster.names import FOLDER_ANNOTATION, RUN_LABEL, SUBMISSION_LABEL, label_of
from argusrl.cluster.notices import Notice, Notices
from argusrl.cluster.run_control import RunControl
from argusrl.cluster.run_record import RunRecord
from argusrl.cluster.targets import RayJobTarget
from argusrl.config.load import load_config
from argusrl.journal.attempts import Heartbeat, Verdict, newest_attempt, next_attempt, write_heartbeat, write_verdict
from argusrl.journal.epochs import Epoch, claim_epoch
from argusrl.journal.submissions import Submission, submissions
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import read_lines
from fakes.kubernetes_api import MemoryKube, Store

RECIPE = Path(__file__).parents[2] / "recipes" / "qwen3vl_8b_hyperpod.yaml"
NODES = ("hyperpod-i-0000000000000head", "hyperpod-i-0123456789abcdef0", "hyperpod-i-0123456789abcdef1")


class Told:
    """Hears notices."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []

    def send(self, notice: Notice) -> None:
        self.notices.append(notice)


class ControlledRun:
    """The run, its objects and one or more controllers. `look` reconciles; nothing else happens by itself."""

    def __init__(self, root: Path, *, queue: bool = False) -> None:
        root.mkdir(exist_ok=True)
        self.root = root
        self.folder = RunFolder(root / "qwen3vl_8b_hyperpod")
        self.label = label_of(self.folder.name)
        self.namespace = str(self._manifest()["metadata"]["namespace"])
        self.store = Store(namespaces_needed=False)
        self.kube = MemoryKube(self.store, self.namespace)
        self.seconds = 100.0
        self.told = Told()
        self.queue = queue
        self.control = self.new_control()
        self.epoch: Epoch | None = None
        self.beats = 0
        self.generation = "abcde"  # of RayClusters: KubeRay makes up their names
        for name in NODES:
            self.node(name)

    def _manifest(self, number: int = 1) -> Object:
        job: Object = render(load_config(RECIPE, []).config, number)[-1].value
        job["metadata"]["annotations"][FOLDER_ANNOTATION] = str(self.folder.path)
        return job

    # ---- controllers

    def new_control(self) -> RunControl:
        """A controller that knows nothing yet."""
        return RunControl(
            record=RunRecord(self.folder, self.root.is_dir),
            target=RayJobTarget(self.kube),
            kube=self.kube,
            notices=Notices(self.folder, wall=lambda: 1.7e9 + self.seconds),
            notifiers=[self.told],
            clock=lambda: self.seconds,
            wall=lambda: 1.7e9 + self.seconds,
        )

    def look(self, control: RunControl | None = None) -> str:
        """One reconciliation; the row of the decision."""
        return (control or self.control).reconcile(self.jobs()).row

    def wait(self, seconds: float, *, beating: bool = False) -> list[str]:
        """Reconcile every five seconds; the rows."""
        rows = []
        for _ in range(int(seconds / 5)):
            self.seconds += 5
            if beating:
                self.beat()
            rows.append(self.look())
        return rows

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.folder.controller_events) if event["kind"] == kind]

    def records(self) -> list[Submission]:
        return submissions(self.folder)

    # ---- a person

    def submit(self, number: int = 1) -> Object:
        job = self._manifest(number)
        if self.queue:
            job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"
        return self.kube.create(RAY_JOB, job)

    # ---- KubeRay

    def jobs(self) -> list[Object]:
        return self.kube.list(RAY_JOB).items

    def job(self, number: int) -> Object:
        return self.kube.get(RAY_JOB, f"{self.label}-s{number}")

    def says(self, number: int, status: str, reason: str = "", job_status: str = "") -> None:
        fields = {
            "jobDeploymentStatus": status,
            "rayClusterName": f"{self.label}-s{number}-{self.generation}",
            **({"reason": reason} if reason else {}),
            **({"jobStatus": job_status} if job_status else {}),
        }
        self.kube.patch(RAY_JOB, f"{self.label}-s{number}", {"status": fields}, sub="status")

    def runs(self, number: int = 1, *, nodes: tuple[str, ...] = NODES) -> None:
        """Pods come up and the driver begins."""
        self.says(number, "Running", job_status="RUNNING")
        for place, node in enumerate(nodes):
            self.pod(number, "head" if place == 0 else "worker", node, place)
        next_attempt(self.folder)
        self.epoch = claim_epoch(self.folder, {"attempt": newest_attempt(self.folder)})
        self.beat()

    def pod(self, number: int, kind: str, node: str, place: int = 0, *, phase: str = "Running") -> str:
        name = f"{self.label}-s{number}-{kind}-{place}"
        self.store.seed(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": self.namespace,
                    "labels": {
                        "ray.io/cluster": f"{self.label}-s{number}-{self.generation}",
                        "ray.io/node-type": kind,
                        RUN_LABEL: self.label,
                        SUBMISSION_LABEL: str(number),
                    },
                },
                "spec": {"containers": [{"name": "ray", "image": "i"}], **({"nodeName": node} if node else {})},
                "status": {
                    "phase": phase,
                    "conditions": [_scheduled(bool(node))],
                    "containerStatuses": [{"name": "ray", "restartCount": 0}],
                },
            }
        )
        return name

    def head(self, number: int = 1) -> str:
        return f"{self.label}-s{number}-head-0"

    def drop(self, pod: str) -> None:
        """A pod object is gone at once."""
        self.kube.delete(POD, pod, grace_seconds=0)

    def pods(self) -> list[str]:
        return sorted(pod["metadata"]["name"] for pod in self.kube.list(POD).items)

    # ---- nodes

    def node(self, name: str, *, ready: bool = True, **labels: str) -> None:
        """Put a node there, or change it."""
        self.kube.delete(NODE, name, grace_seconds=0)
        own = {f"sagemaker.amazonaws.com/{key.replace('_', '-')}": value for key, value in labels.items()}
        self.store.seed(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name, "labels": {"sagemaker.amazonaws.com/cluster-name": "ml", **own}},
                "status": {"conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}]},
            }
        )
        if not ready:
            self.store.dead_nodes.add(name)

    def lose_node(self, name: str) -> None:
        """Its object goes."""
        self.store.dead_nodes.add(name)
        self.kube.delete(NODE, name, grace_seconds=0)

    # ---- the driver

    def beat(self) -> None:
        self.beats += 1
        heartbeat = Heartbeat(time=float(self.beats), pid=1, host="head", epoch=1, step=0, phase="rollout")
        write_heartbeat(self.folder, newest_attempt(self.folder), heartbeat)

    def step(self) -> None:
        self.folder.commits.mkdir(exist_ok=True)
        number = 1 + len(list(self.folder.commits.iterdir()))
        self.folder.commit(number).write_bytes(b"")

    def ends(self, code: int, outcome: str = "failed", error: str = "") -> None:
        verdict = Verdict(outcome=outcome, exit_code=code, reason="because", error=error)
        write_verdict(self.folder, newest_attempt(self.folder), verdict)


def _scheduled(fits: bool) -> Object:
    if fits:
        return {"type": "PodScheduled", "status": "True"}
    return {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
