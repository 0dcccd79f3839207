"""The cluster sections of a recipe: where workers run, what Kubernetes is asked for, what the controller may do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from argusrl.config.base import Count, Natural, Positive, Seconds, Section

DNS_NAME, DNS_NAME_LENGTH = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", 63
DnsName = Annotated[str, Field(pattern=DNS_NAME, max_length=DNS_NAME_LENGTH)]
"""A name that Kubernetes takes for nearly everything (RFC 1123)."""
QUANTITY = r"^[0-9]+(\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?$"
Quantity = Annotated[str, Field(pattern=QUANTITY)]
"""An amount of memory or storage as Kubernetes writes it: 500M, 16Gi, or bytes."""


class NodeGroupSection(Section):
    """Pods of one kind, one on each node."""

    instance: str | None = None
    """Instance type, e.g. ml.g7e.12xlarge: chooses nodes, and sizes pods by what such a node has."""
    instance_group: str | None = None
    """HyperPod instance group that pods are bound to."""
    selector: dict[str, str] = {}
    """More node labels that pods require."""
    cpus: Positive | None = None
    """CPUs of a pod; default is what the instance has, less a reserve. A head without an instance gets 8."""
    memory: Quantity | None = None
    """Memory of a pod; default is what the instance has, less a reserve. A head without an instance gets 16Gi."""
    labels: dict[str, str] = {}
    """More labels of the pods."""


class HeadSection(NodeGroupSection):
    """The pod with Ray's head and the driver."""


class WorkersSection(NodeGroupSection):
    """The pods with ranks, engines and episode workers."""

    nodes: Count = 1
    """Worker pods, each with all GPUs of its node."""
    gpus: Natural | None = None
    """GPUs of a pod; default is what the instance has."""
    efa: Natural | None = None
    """EFA interfaces of a pod; default is what the instance has, 0 with one node."""


class VolumeSection(Section):
    """The shared file system: one that exists."""

    claim: DnsName = "argusrl-shared"
    """PersistentVolumeClaim in the namespace, never owned by the job."""
    mount: Path = Path("/fsx")
    """Where pods see it; run.root lies below."""
    file_system_id: Annotated[str, Field(pattern=r"^fs-[0-9a-f]+$")] | None = None
    """FSx for Lustre: render a static volume (policy Retain) and the claim for it; null takes the claim as it is."""
    dns_name: str | None = None
    """FSx: DNS name of the file system."""
    mount_name: str | None = None
    """FSx: its mount name."""
    capacity: Quantity = "1200Gi"
    """FSx: its size."""
    throughput_mb_per_tib: Count = 250
    """FSx: MB/s for each TiB, for `argusrl plan`."""
    metadata_iops: Count | None = None
    """FSx: metadata operations per second, for `argusrl plan`."""
    storage_class: str | None = None
    """Provision a volume dynamically with this storage class instead; the claim stays when the job goes."""
    uid: Natural = 1000
    """User that pods run as, and that owns what they write."""
    gid: Natural = 1000
    """Group of it (fsGroup)."""


class QueueSection(Section):
    """Kueue, as HyperPod task governance uses it."""

    name: DnsName
    """Local queue, e.g. hyperpod-ns-team-localqueue."""
    priority: DnsName | None = None
    """Workload priority class, e.g. training-priority."""


class KubernetesSection(Section):
    """What `argusrl cluster manifest` renders."""

    namespace: DnsName = "default"
    """Namespace of everything a user creates."""
    image: str
    """Image with argusrl, Ray and vLLM; deploy/Dockerfile builds it."""
    image_pull_secrets: list[DnsName] = []
    """Secrets for pulling it."""
    head: HeadSection = HeadSection()
    """The pod with Ray's head and the driver."""
    workers: WorkersSection = WorkersSection()
    """The pods with ranks, engines and episode workers."""
    volume: VolumeSection = VolumeSection()
    """The shared file system."""
    queue: QueueSection | None = None
    """Kueue queue; null creates the job outside of Kueue."""
    secrets: dict[str, Annotated[str, Field(pattern=r"^[-.a-z0-9]+/[-._A-Za-z0-9]+$")]] = {}
    """Environment variables from Kubernetes secrets: {HF_TOKEN: secret-name/key}."""
    role_arn: str | None = None
    """IAM role of the run's service account (IRSA); null where EKS Pod Identity or nothing gives one."""
    studio: Literal["off", "private", "public"] = "off"
    """Annotations with which Studio's Ray endpoint operator serves the dashboard."""
    nvme: Path | None = Path("/opt/dlami/nvme")
    """Host folder on local NVMe for spilled objects and staged weights; null uses the pod's own disk."""
    operator_namespace: DnsName | None = None
    """Namespace of KubeRay's operator, which may reach the dashboard; null is any that holds a pod with its label."""
    controller_namespace: DnsName = "argusrl-system"
    """Namespace of the argusrl controller, which may reach it, too."""
    egress_ports: list[Annotated[int, Field(ge=1, le=65_535)]] = []
    """More TCP ports that pods may reach anywhere, e.g. of a tool that an environment calls."""
    hang_reports: bool = True
    """Give HyperPod's job monitoring agent the rules by which it sees a run that hangs."""


class NotifySection(Section):
    """Who hears of stalls, faults, budgets and collapses."""

    webhook: str | None = None
    """URL that gets a JSON object by POST; a secret as env:NAME or file:PATH."""
    sns_topic: str | None = None
    """ARN of an SNS topic."""


class BudgetSection(Section):
    """Limits of what the controller does for one run."""

    resubmissions: Natural = 20
    """Submissions of the run after the first, in all."""
    gpu_hours: Positive | None = None
    """GPU-hours of all submissions; the run is stopped when they are spent. null is no limit."""
    replacements: Natural = 4
    """Nodes rebooted or replaced for the run, in all."""
    capacity_wait_seconds: Seconds = 14_400.0
    """Pods that cannot be scheduled for so long end the run; quota that Kueue has not admitted is waited for as long
    as it takes."""


class ClusterSection(Section):
    address: str = "local"
    """local starts Ray on this machine; auto joins the cluster this process runs in; else host:port or ray://…."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What ranks and engines run on."""
    slots: Count | None = None
    """Bundles (one per GPU, on CPU one per slot); default is all GPUs, or 1 on CPU."""
    colocate: bool = True
    """Each bundle holds a rank and an engine; false gives them bundles of their own."""
    engines: Count | None = None
    """colocate false: bundles for engines, of all slots."""
    cpus_per_slot: Positive = 1.0
    """CPUs reserved for a bundle."""
    episode_workers: Count = 1
    """Processes that play episodes (and hold the environment and reward processes)."""
    reward_processes: Count = 1
    """Processes per episode worker that compute Python rewards."""
    start_timeout_seconds: Seconds = 600.0
    """Deadline for resources and actors to come up."""
    call_timeout_seconds: Seconds = 1800.0
    """Deadline of one call to an engine or rank."""
    environment: dict[str, str] = {}
    """Environment variables of all actors; secrets as env:NAME or file:PATH."""
    kubernetes: KubernetesSection | None = None
    """What `argusrl cluster manifest` renders; null where the run is not submitted to Kubernetes."""
    replace_nodes: bool = False
    """Let the controller reboot, then replace, HyperPod nodes that this run occupies alone; false only notifies."""
    budget: BudgetSection = BudgetSection()
    """Limits of what the controller does for this run."""
    notify: NotifySection = NotifySection()
    """Who hears of it."""
