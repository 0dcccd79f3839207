"""What the objects of a submission have in common: names, labels, sizes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from argusrl.cluster.manifests.sizes import PodSize, head_size, worker_size
from argusrl.cluster.names import FOLDER_ANNOTATION, RUN_LABEL, SUBMISSION_LABEL, label_of, submission_name
from argusrl.config.cluster_sections import KubernetesSection, NodeGroupSection
from argusrl.config.sections import Config
from argusrl.errors import ArgusError, ConfigError

NAME_LABEL = "app.kubernetes.io/name"
COMPONENT_LABEL = "app.kubernetes.io/component"
APPLICATION = "argusrl"

RECIPE_FOLDER = PurePosixPath("/etc/argusrl")
NVME_MOUNT = PurePosixPath("/nvme")
HOME = PurePosixPath("/var/argusrl")


@dataclass(frozen=True, slots=True)
class Setup:
    """A recipe, and what follows from it for every object."""

    config: Config
    kubernetes: KubernetesSection
    submission: int
    head: PodSize
    workers: PodSize

    @property
    def run(self) -> str:
        """Label of the run, and name of what all its submissions share."""
        return label_of(str(self.config.run.name))

    @property
    def name(self) -> str:
        """Of the RayJob."""
        return submission_name(str(self.config.run.name), self.submission)

    @property
    def run_folder(self) -> Path:
        return self.config.run.root / str(self.config.run.name)

    @property
    def run_labels(self) -> dict[str, str]:
        return {NAME_LABEL: APPLICATION, RUN_LABEL: self.run}

    @property
    def labels(self) -> dict[str, str]:
        """Of the job and its pods."""
        return {**self.run_labels, SUBMISSION_LABEL: str(self.submission)}

    @property
    def folder_annotation(self) -> dict[str, str]:
        return {FOLDER_ANNOTATION: str(self.run_folder)}

    @property
    def nvme(self) -> Path | None:
        """The host's folder, where workers have such a disk."""
        known = self.workers.instance
        return self.kubernetes.nvme if known is None or known.nvme_bytes else None

    @property
    def weights_key(self) -> str | None:
        """Name of the base weights' copy on NVMe; None where there is none: no NVMe, or a model of the hub."""
        path = self.config.model.path
        if self.nvme is None or not path.startswith("/"):
            return None
        return f"{PurePosixPath(path).name}-{hashlib.sha256(path.encode()).hexdigest()[:12]}"


def on_hyperpod(group: NodeGroupSection) -> bool:
    """Whether nodes of this group are HyperPod's, which alone carry health labels."""
    return group.instance_group is not None or (group.instance or "").startswith("ml.")


def setup_of(config: Config, submission: int = 1) -> Setup:
    """Work out a recipe. Raises ConfigError with everything that is wrong with its Kubernetes part."""
    kubernetes = config.cluster.kubernetes
    if kubernetes is None:
        raise ConfigError(
            "the recipe has no section cluster.kubernetes", "argusrl config explain cluster.kubernetes lists its keys"
        )
    problems: list[str] = []
    sizes: list[PodSize] = []
    for size in (lambda: head_size(kubernetes.head), lambda: worker_size(kubernetes.workers)):
        try:
            sizes.append(size())
        except ArgusError as error:
            problems.append(f"{error.message}{f' ({error.hint})' if error.hint else ''}")
    if not problems:
        problems = _problems(config, kubernetes, *sizes)
    if problems:
        raise ConfigError(problems)
    return Setup(config, kubernetes, submission, *sizes)


def _problems(config: Config, kubernetes: KubernetesSection, head: PodSize, workers: PodSize) -> list[str]:
    found = []
    cluster, nodes = config.cluster, kubernetes.workers.nodes
    if cluster.slots is not None and cluster.device != "cpu" and cluster.slots != nodes * workers.gpus:
        found.append(
            f"cluster.slots {cluster.slots}: {nodes} nodes of {workers.gpus} GPUs are {nodes * workers.gpus} slots; "
            "leave slots out to take all, or change workers.nodes"
        )
    if cluster.device == "cuda" and workers.gpus == 0:
        found.append("cluster.device cuda: the workers of cluster.kubernetes have no GPU; name an instance with GPUs")
    if cluster.device == "cpu" and workers.gpus:
        found.append(
            f"cluster.device cpu: the workers of cluster.kubernetes would hold {nodes * workers.gpus} GPUs for "
            "nothing; set device auto, or workers.gpus: 0"
        )
    if workers.gpus and config.engine.tensor_parallel > workers.gpus:
        found.append(f"engine.tensor_parallel {config.engine.tensor_parallel}: a node has {workers.gpus} GPUs")
    slots = cluster.slots or nodes * workers.gpus
    need = slots * cluster.cpus_per_slot
    if need > nodes * workers.cpus:
        found.append(
            f"cluster.cpus_per_slot {cluster.cpus_per_slot:g}: {slots} slots take {need:g} CPUs, and {nodes} pods have "
            f"{nodes * workers.cpus:g}"
        )
    for name, size, section in (("head", head, kubernetes.head), ("workers", workers, kubernetes.workers)):
        found += _too_large(f"cluster.kubernetes.{name}", size, section)
    return found


def _too_large(key: str, size: PodSize, section: NodeGroupSection) -> list[str]:
    known = size.instance
    if known is None:
        return []
    found = []
    if size.cpus > known.allocatable_cpus:
        found.append(f"{key}.cpus {size.cpus:g}: pods on {section.instance} may ask for {known.allocatable_cpus}")
    if size.memory_bytes > known.allocatable_bytes:
        found.append(
            f"{key}.memory {section.memory}: pods on {section.instance} may ask for {known.allocatable_bytes >> 30}Gi"
        )
    if size.gpus > known.gpus:
        found.append(f"{key}.gpus {size.gpus}: {section.instance} has {known.gpus}")
    if size.efa > known.efa:
        found.append(f"{key}.efa {size.efa}: {section.instance} has {known.efa}")
    return found
