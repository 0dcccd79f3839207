"""Nodes: health, GPUs and EFA as the scheduler sees them, and whether a recipe fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from argusrl.cluster.doctor.finding import Finding, Subject
from argusrl.cluster.kinds import NODE
from argusrl.cluster.kube_api import Object, labels_of
from argusrl.cluster.manifests.placement import INSTANCE_LABEL, group_selector
from argusrl.cluster.manifests.sizes import worker_size
from argusrl.cluster.node_health import node_health
from argusrl.config.cluster_sections import NodeGroupSection, WorkersSection
from argusrl.errors import ConfigError

GPU, EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"


def check_nodes(subject: Subject) -> list[Finding]:
    """Every node's readiness and health, what GPUs and EFA interfaces there are, and what the recipe asks for."""
    nodes = subject.kube.list(NODE).items
    found = [_health(nodes), _devices(nodes)]
    section = subject.config.cluster.kubernetes if subject.config is not None else None
    if section is not None:
        found.append(_fits("head", section.head, 1, nodes))
        found.append(_fits("workers", section.workers, section.workers.nodes, nodes))
    return found


def _health(nodes: Sequence[Object]) -> Finding:
    seen = [node_health(node) for node in nodes]
    sick = [f"{one.name}: {one.text()}" for one in seen if not (one.ready and one.healthy)]
    if sick:
        return Finding(
            "node health",
            "warning",
            f"{len(sick)} of {len(nodes)} nodes: {', '.join(sick)}",
            "HyperPod replaces a node in 20 to 30 minutes where NodeRecovery is Automatic; else reboot or replace it",
        )
    if not nodes:
        return Finding("node health", "warning", "the cluster has no nodes", "add an instance group with nodes")
    labelled = sum(bool(one.status) for one in seen)
    return Finding("node health", "ok", f"{len(nodes)} nodes are ready, {labelled} carry HyperPod's health label")


def _devices(nodes: Sequence[Object]) -> Finding:
    kinds: Counter[tuple[str, int, int]] = Counter()
    for node in nodes:
        kinds[labels_of(node).get(INSTANCE_LABEL, "unknown type"), amount(node, GPU), amount(node, EFA)] += 1
    text = ", ".join(
        f"{count} × {kind} ({gpus} GPUs, {efa} EFA)" if gpus or efa else f"{count} × {kind}"
        for (kind, gpus, efa), count in sorted(kinds.items())
    )
    if not any(gpus for _, gpus, _ in kinds):
        fix = "nodes with GPUs need NVIDIA's device plugin: HyperPod's Helm chart installs it"
        return Finding("gpus", "warning", f"no node offers {GPU}: {text or 'no nodes'}", fix)
    return Finding("gpus", "ok", text)


def _fits(role: str, group: NodeGroupSection, count: int, nodes: Sequence[Object]) -> Finding:
    wanted = group_selector(group)
    matching = [node for node in nodes if wanted.items() <= labels_of(node).items()]
    text = ", ".join(f"{key}={value}" for key, value in wanted.items()) or "any node"
    if len(matching) < count:
        return Finding(
            f"nodes for {role}",
            "failed",
            f"{len(matching)} of the {count} nodes needed have {text}",
            f"raise the instance group's count, or change cluster.kubernetes.{role}",
        )
    gpus = efa = 0
    if isinstance(group, WorkersSection):
        try:
            size = worker_size(group)
        except ConfigError as error:
            return Finding(f"nodes for {role}", "failed", error.message, error.hint)
        gpus, efa = size.gpus, size.efa
    able = [
        node
        for node in matching
        if node_health(node).ready
        and node_health(node).healthy
        and not (node.get("spec") or {}).get("unschedulable")
        and amount(node, GPU) >= gpus
        and amount(node, EFA) >= efa
    ]
    needs = f"{gpus} GPUs and {efa} EFA interfaces" if gpus or efa else "room"
    if len(able) < count:
        return Finding(
            f"nodes for {role}",
            "warning",
            f"{len(able)} of the {count} nodes needed are healthy and offer {needs} ({text})",
            "the job would wait for the others: kubectl describe node; are the device plugins running?",
        )
    return Finding(f"nodes for {role}", "ok", f"{len(able)} nodes with {text} offer {needs}; {count} needed")


def amount(node: Object, resource: str) -> int:
    """What a node offers of a device."""
    text = str(((node.get("status") or {}).get("allocatable") or {}).get(resource, "0"))
    return int(text) if text.isdecimal() else 0
