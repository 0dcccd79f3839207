"""A small run on a Kubernetes that is made of raylets, under the real controller."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argusrl.cluster.kinds import POD, RAY_JOB
from argusrl.cluster.manifests.render import render
from argusrl.cluster.submit import next_number, submit_documents
from argusrl.config.load import load_config
from argusrl.journal.commits import CommitChain
from argusrl.journal.drains import Drained, asked_pods, read_drained
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import read_lines
from e2e.conftest import QUICKSTART, ROOT, command
from e2e.pods_as_raylets import PodsAsRaylets, tail
from e2e.run_on_raylets import RECIPE
from fakes.kubernetes_api import ApiServer

PATIENCE_SECONDS = 240.0


@dataclass
class OnKubernetes:
    """A submitted run, and everything around it."""

    server: ApiServer
    pods: PodsAsRaylets
    folder: RunFolder
    logs: Path
    controller: subprocess.Popen[bytes]

    def until(self, what: Callable[[], object]) -> None:
        """Wait until something is so, while everybody lives."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not what():
            assert self.pods.error is None, self.pods.error
            assert self.controller.poll() is None, tail(self.logs / "controller.log")
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.05)

    def told(self) -> str:
        """What happened so far, for messages."""
        objects = [
            (pod["metadata"]["name"], pod["status"].get("phase"), pod["spec"].get("nodeName"))
            for pod in self.server.store.objects(POD)
        ]
        jobs = [(job["metadata"]["name"], job.get("status")) for job in self.server.store.objects(RAY_JOB)]
        logs = "\n".join(f"--- {path.name}\n{tail(path)}" for path in sorted(self.logs.glob("*.log")))
        return f"{objects}\n{jobs}\n{logs}"

    def step(self) -> int:
        head = CommitChain(self.folder).head()
        return -1 if head is None else head.step

    def commits(self, more: int) -> None:
        """Wait for so many further steps."""
        goal = self.step() + more
        self.until(lambda: self.step() >= goal)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.folder.events) if event["kind"] == kind]

    def submitted(self) -> list[dict[str, Any]]:
        """What the controller gave to the cluster."""
        return [event for event in read_lines(self.folder.controller_events) if event["kind"] == "submitted"]

    def drained(self) -> list[Drained]:
        answers = [read_drained(self.folder, pod) for pod in asked_pods(self.folder)]
        return [answer for answer in answers if answer is not None]


@contextmanager
def on_kubernetes(root: Path, *overrides: str) -> Iterator[OnKubernetes]:
    """Submit a small run to two worker nodes and a head's node, with a spare of each; the controller watches."""
    (root / "models").symlink_to(ROOT / "models")
    section = "cluster.kubernetes"
    words = [
        f"run.root={root / 'runs'}",
        "run.name=maze",
        f"model.path={root / 'models' / 'tiny-qwen3vl'}",
        *RECIPE,
        "cluster.address=auto",
        "cluster.device=cpu",
        "recovery.min_ranks=1",
        f"{section}.image=argusrl:test",
        f"{section}.volume.mount={root}",
        f"{section}.workers.nodes=2",
        f"{section}.workers.gpus=0",
        f"{section}.workers.cpus=1",
        f"{section}.workers.memory=4Gi",
        f"{section}.nvme=null",
        *overrides,
    ]
    config = load_config(QUICKSTART, words).config
    logs = root / "logs"
    logs.mkdir()
    (root / "runs").mkdir()
    with ApiServer() as server, PodsAsRaylets(server.store, logs) as pods:
        for group in ("head", "head", "workers", "workers"):
            pods.add_node(group)
        kube = server.connect()
        submit_documents(kube, render(config, 1), "maze", next_number(kube, "maze", "default"))
        with (logs / "controller.log").open("wb") as output:
            controller = subprocess.Popen(
                command("cluster", "watch", "--root", root / "runs"),
                cwd=ROOT,
                env={**os.environ, "KUBECONFIG": str(server.write_kubeconfig(root / "kubeconfig"))},
                stdout=output,
                stderr=output,
            )
        try:
            yield OnKubernetes(server, pods, RunFolder(root / "runs" / "maze"), logs, controller)
        finally:
            controller.terminate()
            controller.wait(30)
