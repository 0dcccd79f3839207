"""Runs on a Ray cluster of several raylets, for tests that do something to its nodes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from argusrl.journal.commits import Commit, CommitChain
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import read_lines
from e2e.cluster_of_raylets import RayletCluster
from e2e.conftest import QUICKSTART, ROOT, command

RECIPE = [
    "data.heldout_size=8",
    "algorithm.num_steps=200",
    "algorithm.prompts_per_step=4",
    "algorithm.group_size=4",
    "algorithm.updates_per_step=1",
    "evaluate.every_steps=0",
    "checkpoint.every_steps=500",
    "checkpoint.keep_adapters=500",
    "observe.display=plain",
    "observe.tensorboard=false",
    "cluster.slots=2",
    "cluster.cpus_per_slot=1",
    "recovery.standby_engines=0",
]
PATIENCE_SECONDS = 240.0


class Training:
    """One `argusrl train`, and what its folder tells."""

    def __init__(self, cluster: RayletCluster, root: Path, name: str, *overrides: str) -> None:
        self.folder, self.output = RunFolder(root / name), root / f"{name}.{time.monotonic_ns()}.log"
        words = [f"run.root={root}", f"run.name={name}", f"cluster.address={cluster.address}", *RECIPE, *overrides]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command("train", QUICKSTART, *words), cwd=ROOT, env=cluster.environment, stdout=output, stderr=output
            )

    def events(self, kind: str) -> list[dict]:
        if not self.folder.events.exists():
            return []
        return [event for event in read_lines(self.folder.events) if event["kind"] == kind]

    def head(self) -> Commit | None:
        return CommitChain(self.folder).head()

    def step(self) -> int:
        head = self.head()
        return -1 if head is None else head.step

    def until(self, what: Callable[[], object]) -> None:
        """Wait until something is so, while the command runs."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not what():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def commits(self, more: int) -> None:
        """Wait for so many further steps."""
        goal = self.step() + more
        self.until(lambda: self.step() >= goal)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        """Supervisor and driver at once."""
        family = [*psutil.Process(self.process.pid).children(), psutil.Process(self.process.pid)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(timeout=30)

    def ranks(self) -> list[int]:
        chain = CommitChain(self.folder)
        return [chain.read(step).conditions["ranks"] for step in range(1, self.step() + 1)]


@contextmanager
def cluster_of(nodes: int) -> Iterator[RayletCluster]:
    with RayletCluster() as cluster:
        for _ in range(nodes):
            cluster.add()
        yield cluster


@contextmanager
def training(cluster: RayletCluster, root: Path, name: str, *overrides: str) -> Iterator[Training]:
    run = Training(cluster, root, name, *overrides)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.kill()


def asked_of(cluster: RayletCluster, program: str) -> Any:
    """What a program finds that joins the cluster, prints one line of JSON and leaves again."""
    join = "import json, sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='error')\n"
    words = [*command()[:1], "-c", join + program, cluster.address]
    done = subprocess.run(words, env=cluster.environment, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def left_on(cluster: RayletCluster) -> dict[str, list[str]]:
    """Actors and placement groups of all namespaces that still exist."""
    left: dict[str, list[str]] = asked_of(
        cluster,
        "groups = ray.util.placement_group_table().values()\n"
        "print(json.dumps({'actors': [a['name'] for a in ray.util.list_named_actors(all_namespaces=True)],"
        " 'groups': [g['name'] for g in groups if g['state'] != 'REMOVED']}))",
    )
    return left


def actors_on(cluster: RayletCluster) -> dict[str, list[str]]:
    """Classes of the living actors of each node, the head's under "head"."""
    found: dict[str, list[str]] = asked_of(
        cluster,
        "heads = {n['NodeID'] for n in ray.nodes() if 'node:__internal_head__' in n['Resources']}\n"
        "found = {}\n"
        "for one in ray._private.state.state.actor_table(None).values():\n"
        "    if one['State'] == 'ALIVE':\n"
        "        node = one['Address']['NodeID']\n"
        "        found.setdefault('head' if node in heads else node, []).append(one['ActorClassName'].split('.')[-1])\n"
        "print(json.dumps(found))",
    )
    return found


def head_store_bytes(cluster: RayletCluster) -> int:
    """Of all objects that the object store of the head ever held."""
    created: int = asked_of(
        cluster,
        "from ray._private.internal_api import node_stats\n"
        "head = next(n for n in ray.nodes() if 'node:__internal_head__' in n['Resources'])\n"
        "stats = node_stats(head['NodeManagerAddress'], head['NodeManagerPort'], False)\n"
        "print(stats.store_stats.cumulative_created_bytes)",
    )
    return created


def phases(run: Training) -> list[dict]:
    """What the driver has been doing."""
    (path,) = run.folder.attempts.glob("*/phases.jsonl")
    return list(read_lines(path))
