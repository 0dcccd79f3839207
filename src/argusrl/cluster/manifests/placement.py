"""Which nodes pods go to, and how long they stay on one that does not answer."""

from __future__ import annotations

from typing import Any

from argusrl.cluster.manifests.setup import COMPONENT_LABEL, Setup, on_hyperpod
from argusrl.cluster.names import RUN_LABEL
from argusrl.config.cluster_sections import NodeGroupSection

HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"
"""Also the key of the taint of nodes that HyperPod wants empty: no pod may tolerate it."""

DEEP_CHECK_LABEL = "sagemaker.amazonaws.com/deep-health-check-status"
GROUP_LABEL = "sagemaker.amazonaws.com/instance-group-name"
INSTANCE_LABEL = "node.kubernetes.io/instance-type"
HOST_TOPOLOGY = "kubernetes.io/hostname"

GONE_SECONDS = 30
"""A pod stays so long on a node that is not ready or cannot be reached; Kubernetes' own default is five minutes."""

_NEAR_TOPOLOGY = "topology.k8s.aws/network-node-layer-3"  # nodes below the same switch


def head_placement(setup: Setup) -> dict[str, Any]:
    """HyperPod watches no CPU node, so the head asks for no health label: its instance group chooses.

    A head that the recipe puts nowhere stays off the workers' nodes if it can: they are asked for whole.
    """
    head, workers = setup.kubernetes.head, setup.kubernetes.workers
    terms: dict[str, Any] = {}
    if not group_selector(head) and workers.instance is not None:
        elsewhere = {"key": INSTANCE_LABEL, "operator": "NotIn", "values": [workers.instance]}
        preference = {"weight": 100, "preference": {"matchExpressions": [elsewhere]}}
        terms = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preference]}}
    return _placement(head, terms, gone_tolerations())


def worker_placement(setup: Setup) -> dict[str, Any]:
    """Healthy nodes with GPUs, one pod of the run on each, near each other where that can be had."""
    group = setup.kubernetes.workers
    terms: dict[str, Any] = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "labelSelector": {"matchLabels": {RUN_LABEL: setup.run, COMPONENT_LABEL: "worker"}},
                    "topologyKey": HOST_TOPOLOGY,
                }
            ]
        }
    }
    tolerations = gone_tolerations()
    if setup.workers.gpus:
        tolerations.insert(0, {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if on_hyperpod(group) and setup.workers.gpus:
        terms["nodeAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [_is(HEALTH_LABEL, "Schedulable")]}]
            },
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "preference": {"matchExpressions": [_is(DEEP_CHECK_LABEL, "Passed")]}}
            ],
        }
        if group.nodes > 1:
            terms["podAffinity"] = {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 50,
                        "podAffinityTerm": {
                            "labelSelector": {"matchLabels": {RUN_LABEL: setup.run, COMPONENT_LABEL: "worker"}},
                            "topologyKey": _NEAR_TOPOLOGY,
                        },
                    }
                ]
            }
    return _placement(group, terms, tolerations)


def group_selector(group: NodeGroupSection) -> dict[str, str]:
    """Labels of the nodes of a group."""
    selector = dict(group.selector)
    if group.instance is not None:
        selector[INSTANCE_LABEL] = group.instance
    if group.instance_group is not None:
        selector[GROUP_LABEL] = group.instance_group
    return selector


def gone_tolerations() -> list[dict[str, Any]]:
    """Leave a node that is gone soon."""
    keys = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": GONE_SECONDS} for key in keys
    ]


def _placement(group: NodeGroupSection, affinity: dict[str, Any], tolerations: list[dict[str, Any]]) -> dict[str, Any]:
    selector = group_selector(group)
    value: dict[str, Any] = {}
    if selector:
        value["nodeSelector"] = selector
    if affinity:
        value["affinity"] = affinity
    return {**value, "tolerations": tolerations}


def _is(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": [value]}
