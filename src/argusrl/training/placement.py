"""Ray: joins or starts a cluster, reserves one bundle per GPU (on CPU: per slot), and places actors in bundles.

In a run everything is named and detached, in a namespace of the run: a driver that follows one that died finds the
bundles and the living workers again (`find`), and reaps what is not needed any more.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray
import ray._private.worker as ray_worker
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from argusrl.cluster.local import HEAD_FOLDER, await_address, object_store_bytes
from argusrl.config.bundles import split
from argusrl.config.sections import ClusterSection
from argusrl.errors import ClusterError
from argusrl.storage.layout import RunFolder

_FIXED_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_DEDUP_LOGS": "0",
}
_BUNDLES = "bundles"  # name of the placement group in the namespace of the run
_HEAD_RESOURCE = "node:__internal_head__"  # Ray gives it to the head's node alone
_NODE_LABEL = "ray.io/node-id"
_NAME = re.compile(r"(?P<kind>[a-z]+)(?P<number>\d+)\.e(?P<epoch>\d+)\.(?P<count>\d+)")


@dataclass(frozen=True, slots=True)
class Layout:
    """How many of what, resolved from the recipe and the resources that are there."""

    device: Literal["cpu", "cuda"]
    ranks: int
    engines: int
    colocate: bool
    episode_workers: int
    cpus_per_slot: float

    def bundle(self, kind: str, number: int) -> int:
        """The bundle of a "rank" or "engine"; engines come first where they do not share theirs with ranks."""
        return number + (self.engines if kind == "rank" and not self.colocate else 0)


@dataclass(slots=True)
class Placement:
    """The reserved bundles of a run. Close it to give them back."""

    layout: Layout
    group: PlacementGroup
    environment: dict[str, str]
    epoch: int  # goes into the names of actors
    detached: bool
    temporary: Path | None = None
    head: str | None = None  # the head's node, where it is kept free of workers
    left: set[str] = field(default_factory=set)  # nodes that live, but are not used any more
    actors: list[Any] = field(default_factory=list)
    counter: Any = field(default_factory=lambda: itertools.count(1))

    def start(
        self,
        kind: str,
        number: int,
        actor_class: type,
        *arguments: Any,
        bundle: int | None,
        environment: dict[str, str],
        idle: bool = False,
        groups: dict[str, int] | None = None,
        **options: Any,
    ) -> Any:
        """A Ray actor in a bundle, or outside (None: spread over the nodes, reserving nothing).

        Its first argument is its name. Colocated ranks and engines take half of the bundle's GPU or CPU each;
        an `idle` one takes nothing. `groups` are concurrency groups.
        """
        name = f"{kind}{number}.e{self.epoch:04d}.{next(self.counter)}"
        if bundle is None:
            options |= {"scheduling_strategy": "SPREAD", "num_cpus": 0, **_elsewhere(self.head)}
        else:
            options |= self._in_bundle(bundle, idle)
        if self.detached:
            options |= {"name": name, "lifetime": "detached"}
        decorated = ray.remote(concurrency_groups=groups)(actor_class) if groups else ray.remote(actor_class)
        handle = decorated.options(
            runtime_env={"env_vars": {**self.environment, **environment}}, max_restarts=0, **options
        ).remote(name, *arguments)
        self.actors.append(handle)
        return handle

    def _in_bundle(self, bundle: int, idle: bool) -> dict[str, Any]:
        share = 0.0 if idle else 0.5 if self.layout.colocate else 1.0
        resources = (
            {"num_gpus": share, "num_cpus": 0}
            if self.layout.device == "cuda"
            else {"num_cpus": share * min(1.0, self.layout.cpus_per_slot)}
        )
        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
        )
        return {"scheduling_strategy": strategy, **resources}

    def find(self) -> dict[tuple[str, int], Any]:
        """Living workers of drivers before this one, by kind and number; what is not the newest is reaped."""
        if not self.detached:
            return {}
        named = sorted(
            (int(match["epoch"]), int(match["count"]), name, (match["kind"], int(match["number"])))
            for name in ray.util.list_named_actors()
            if (match := _NAME.fullmatch(name))
        )
        found: dict[tuple[str, int], Any] = {}
        for _, _, name, place in named:
            with suppress(ValueError):  # it died meanwhile
                actor = ray.get_actor(name)
                self.actors.append(actor)
                if place in found:
                    ray.kill(found[place])
                found[place] = actor
        return found

    def homes(self) -> dict[int, str]:
        """The node of each bundle. One whose node is lost, or left, is not in it until Ray has found another one."""
        living = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - self.left
        places: dict[int, str] = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        return {int(bundle): node for bundle, node in places.items() if node in living}

    def usable_nodes(self) -> set[str]:
        """Living nodes on which workers may be, whether or not there is room for a bundle."""
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]} - self.left - {self.head}

    def close(self) -> None:
        """Kill the actors, give the bundles back, leave the cluster (stop it if this process started it)."""
        for actor in self.actors:
            with suppress(Exception):  # gone already
                ray.kill(actor)
        self.actors.clear()
        with suppress(Exception):
            remove_placement_group(self.group)
        self.leave()

    def leave(self) -> None:
        """Leave the cluster; the actors and bundles stay, for the driver that owns them now."""
        ray.shutdown()
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)


def place(
    cluster: ClusterSection, environment: dict[str, str], *, run: RunFolder | None = None, epoch: int = 0
) -> Placement:
    """Start or join Ray and reserve the bundles. Raises ClusterError when they do not come within the deadline.

    With `run` everything outlives this process, and bundles that an earlier driver of it reserved are taken over.
    """
    temporary = _join(cluster, _namespace(run))
    try:
        layout = resolve_layout(cluster, ray.cluster_resources())
        bundles = _bundles(cluster, layout)
        head = head_to_keep_free(ray.nodes(), bundles)
        group = _reserve(cluster, bundles, head, detached=run is not None)
    except BaseException:
        ray.shutdown()
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Placement(layout, group, {**_FIXED_ENVIRONMENT, **environment}, epoch, run is not None, temporary, head)


def _namespace(run: RunFolder | None) -> str | None:
    if run is None:
        return None
    return f"argusrl-{run.name}-{hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:12]}"


def _join(cluster: ClusterSection, namespace: str | None) -> Path | None:
    # Ray's own reports of dead workers go to the driver's log: the run says itself what it does about them. There is
    # no setting for those that Ray prints past its logger, so the function that prints them is replaced.
    setattr(ray_worker, "print_to_stdstream", lambda data, *_, **__: logging.info("%s", data))  # noqa: B010
    options = {"log_to_driver": False, "configure_logging": False, "namespace": namespace}
    address = cluster.address
    if address == "local" and HEAD_FOLDER in os.environ:  # of the supervisor
        address = await_address(os.environ, cluster.start_timeout_seconds)
    if address != "local":
        try:
            ray.init(address=address, **options)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ClusterError(
                f"cannot join the Ray cluster at cluster.address = {cluster.address!r}: {error}",
                "is it running, and is this process on one of its nodes? `ray status` tells",
            ) from error
        return None
    os.environ.pop("RAY_ADDRESS", None)
    temporary = Path(tempfile.mkdtemp(prefix="argusrl-ray-"))  # short: sockets below it have a length limit
    cores = os.cpu_count() or 1
    needed = int((cluster.slots or 1) * cluster.cpus_per_slot + 0.999)
    try:
        ray.init(
            address="local",
            num_cpus=max(cores, needed),
            include_dashboard=False,
            object_store_memory=object_store_bytes(),
            _temp_dir=str(temporary),
            **options,
        )
    except (OSError, ValueError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ClusterError(
            f"cannot start Ray on this machine: {error}", "see /dev/shm and free memory: argusrl doctor"
        ) from error
    return temporary


def resolve_layout(cluster: ClusterSection, resources: dict[str, float]) -> Layout:
    """Fill in what the recipe leaves open. Raises ClusterError when the resources cannot hold it."""
    gpus = int(resources.get("GPU", 0))
    device = cluster.device if cluster.device != "auto" else ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise ClusterError("cluster.device is cuda but Ray sees no GPU", "set cluster.device: cpu, or check the driver")
    slots = cluster.slots or (gpus if device == "cuda" else 1)
    if device == "cuda" and slots > gpus:
        raise ClusterError(f"cluster.slots = {slots} but Ray sees {gpus} GPUs", f"set cluster.slots to at most {gpus}")
    ranks, engines = split(cluster, slots)
    if ranks < 1 or engines < 1:
        raise ClusterError(
            f"{slots} slots cannot hold separate ranks ({ranks}) and engines ({engines})",
            "use cluster.colocate: true or more slots",
        )
    return Layout(device, ranks, engines, cluster.colocate, cluster.episode_workers, cluster.cpus_per_slot)


def is_head(node: dict[str, Any]) -> bool:
    """Whether an entry of ray.nodes() is the head's."""
    return _HEAD_RESOURCE in node["Resources"]


def head_to_keep_free(nodes: Sequence[dict[str, Any]], bundles: Sequence[dict[str, float]]) -> str | None:
    """The node of the head where workers can be, and should be, elsewhere: it has the driver and Ray's own services.

    None where the head is the only node, or its resources are needed.
    """

    def room(node: dict[str, Any]) -> int:
        return int(min(node["Resources"].get(name, 0.0) / amount for name, amount in bundles[0].items()))

    living = [node for node in nodes if node["Alive"]]
    head = next((node for node in living if is_head(node)), None)
    if head is None:
        return None
    others = sum(room(node) for node in living if node is not head)
    return str(head["NodeID"]) if others >= len(bundles) or room(head) == 0 else None


def _elsewhere(head: str | None) -> dict[str, Any]:
    """Options of a worker outside of the bundles."""
    return {} if head is None else {"label_selector": {_NODE_LABEL: f"!{head}"}}


def _bundles(cluster: ClusterSection, layout: Layout) -> list[dict[str, float]]:
    one = {"CPU": cluster.cpus_per_slot}
    if layout.device == "cuda":
        one["GPU"] = 1
    return [one] * (layout.ranks if layout.colocate else layout.ranks + layout.engines)


def _reserve(
    cluster: ClusterSection, bundles: list[dict[str, float]], head: str | None, *, detached: bool
) -> PlacementGroup:
    group = _reserved(bundles) if detached else None
    if group is not None:  # bundles whose node is lost are waited for, or gone without, once the run is attached
        return group
    options: dict[str, Any] = {"name": _BUNDLES, "lifetime": "detached"} if detached else {}
    if head is not None:
        options["bundle_label_selector"] = [{_NODE_LABEL: f"!{head}"}] * len(bundles)
    group = placement_group(bundles, strategy="PACK", **options)
    if not group.wait(cluster.start_timeout_seconds):
        one = bundles[0]
        have = {name: ray.cluster_resources().get(name, 0) for name in one}
        remove_placement_group(group)
        waited = f"{cluster.start_timeout_seconds:.0f} s"
        raise ClusterError(
            f"{len(bundles)} bundles of {one} did not become free within {waited}; the cluster has {have}",
            "lower cluster.slots or cluster.cpus_per_slot, or add nodes",
        )
    return group


def _reserved(bundles: list[dict[str, float]]) -> PlacementGroup | None:
    """The group that an earlier driver of this run was given; one of another shape, or never given, is dropped."""
    try:
        group = ray.util.get_placement_group(_BUNDLES)
    except ValueError:
        return None
    created = ray.util.placement_group_table(group)["state"] in ("CREATED", "RESCHEDULING")
    if group.bundle_specs == bundles and created:
        return group
    remove_placement_group(group)
    return None
