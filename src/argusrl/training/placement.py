"""Ray: joins or starts a cluster, reserves one bundle per GPU (on CPU: per slot), and places actors in bundles."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from argusrl.config.sections import ClusterSection
from argusrl.errors import ClusterError

_OBJECT_STORE_BYTES = 200 << 20  # local runs: payloads go through the run folder, so the store stays small
_FIXED_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_DEDUP_LOGS": "0",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How many of what, resolved from the recipe and the resources that are there."""

    device: Literal["cpu", "cuda"]
    ranks: int
    engines: int
    colocate: bool
    episode_workers: int
    cpus_per_slot: float


@dataclass(slots=True)
class Placement:
    """The reserved bundles of a run. Close it to give them back."""

    layout: Layout
    group: PlacementGroup
    environment: dict[str, str]
    temporary: Path | None = None
    actors: list[Any] = field(default_factory=list)

    def start(
        self, actor_class: type, bundle: int, *arguments: Any, environment: dict[str, str], **options: Any
    ) -> Any:
        """A Ray actor in a bundle. Colocated ranks and engines take half of the bundle's GPU or CPU each."""
        share = 0.5 if self.layout.colocate else 1.0
        resources = (
            {"num_gpus": share, "num_cpus": 0}
            if self.layout.device == "cuda"
            else {"num_cpus": share * min(1.0, self.layout.cpus_per_slot)}
        )
        handle = (
            ray.remote(actor_class)
            .options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
                ),
                runtime_env={"env_vars": {**self.environment, **environment}},
                max_restarts=0,
                **resources,
                **options,
            )
            .remote(*arguments)
        )
        self.actors.append(handle)
        return handle

    def start_outside(self, actor_class: type, *arguments: Any, environment: dict[str, str], **options: Any) -> Any:
        """A Ray actor outside the bundles (episode workers): spread over the nodes, reserving nothing."""
        handle = (
            ray.remote(actor_class)
            .options(
                num_cpus=0,
                scheduling_strategy="SPREAD",
                runtime_env={"env_vars": {**self.environment, **environment}},
                max_restarts=0,
                **options,
            )
            .remote(*arguments)
        )
        self.actors.append(handle)
        return handle

    def close(self) -> None:
        """Kill the actors, give the bundles back, leave the cluster (stop it if this run started it)."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors.clear()
        remove_placement_group(self.group)
        ray.shutdown()
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)


def place(cluster: ClusterSection, environment: dict[str, str]) -> Placement:
    """Start or join Ray and reserve the bundles. Raises ClusterError when they do not come within the deadline."""
    temporary = _join(cluster)
    try:
        layout = resolve_layout(cluster, ray.cluster_resources())
        group = _reserve(cluster, layout)
    except BaseException:
        ray.shutdown()
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Placement(layout, group, {**_FIXED_ENVIRONMENT, **environment}, temporary)


def _join(cluster: ClusterSection) -> Path | None:
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if cluster.address != "local":
        try:
            ray.init(address=cluster.address, **quiet)
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
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(temporary),
            **quiet,
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
    engines = slots if cluster.colocate else (cluster.engines or slots // 2)
    ranks = slots if cluster.colocate else slots - engines
    if ranks < 1 or engines < 1:
        raise ClusterError(
            f"{slots} slots cannot hold separate ranks ({ranks}) and engines ({engines})",
            "use cluster.colocate: true or more slots",
        )
    return Layout(device, ranks, engines, cluster.colocate, cluster.episode_workers, cluster.cpus_per_slot)


def _reserve(cluster: ClusterSection, layout: Layout) -> PlacementGroup:
    one = {"CPU": cluster.cpus_per_slot}
    if layout.device == "cuda":
        one["GPU"] = 1
    bundles = layout.ranks if layout.colocate else layout.ranks + layout.engines
    group = placement_group([one] * bundles, strategy="PACK")
    if not group.wait(cluster.start_timeout_seconds):
        have = {name: ray.cluster_resources().get(name, 0) for name in one}
        remove_placement_group(group)
        waited = f"{cluster.start_timeout_seconds:.0f} s"
        raise ClusterError(
            f"{bundles} bundles of {one} did not become free within {waited}; the cluster has {have}",
            "lower cluster.slots or cluster.cpus_per_slot, or add nodes",
        )
    return group
