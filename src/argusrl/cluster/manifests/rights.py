"""What the controller and users may do in Kubernetes, and why: one line for each right.

What is not namespaced is only read. Nobody may read secrets or change the rights of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

READ = ("get", "list", "watch")


class Right(NamedTuple):
    """One rule of a Role."""

    group: str  # API group; "" is the core
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    why: str


CONTROLLER = (
    Right("ray.io", ("rayjobs",), (*READ, "create", "delete"), "watch runs, submit them again"),
    Right("ray.io", ("rayclusters",), READ, "find a run's pods; clusters that people made"),
    Right("", ("pods",), (*READ, "delete"), "where the head is; free what dead nodes hold"),
    Right("", ("events",), ("list",), "why pods ended, kept in the run folder"),
    Right("", ("serviceaccounts",), ("get", "patch"), "note on a run's account which submissions there were"),
)
"""In namespaces with runs."""

CONTROLLER_CLUSTER = (
    Right("", ("nodes",), READ, "health labels, and which instance a node is"),
    Right("", ("pods",), ("list",), "whether a run has a node to itself, before it is replaced"),
)
"""Of the whole cluster."""

USER = (
    Right("ray.io", ("rayjobs",), (*READ, "create", "delete", "patch"), "submit and stop runs"),
    Right("ray.io", ("rayclusters",), (*READ, "patch"), "run in a Ray cluster that is there"),
    Right("", ("configmaps", "serviceaccounts"), (*READ, "create", "patch"), "recipe and account of a run"),
    Right("", ("persistentvolumeclaims",), (*READ, "create", "patch"), "the shared file system's claim"),
    Right("networking.k8s.io", ("networkpolicies",), (*READ, "create", "patch"), "who reaches a run's dashboard"),
    Right("", ("pods",), (*READ, "create", "delete", "patch"), "status; doctor's own pods; asking for a drain"),
    Right("", ("pods/log", "events", "services"), READ, "logs, and why pods wait"),
    Right("", ("pods/exec", "pods/portforward"), ("get", "create"), "doctor's probes, dashboard, drain"),
    Right("kueue.x-k8s.io", ("workloads", "localqueues"), READ, "what waits for quota"),
)
"""For whoever runs things in a namespace."""

USER_CLUSTER = (
    Right("", ("nodes",), READ, "status: which node is how"),
    Right("", ("persistentvolumes",), ("get", "list"), "doctor: what the claim is bound to"),
    Right("storage.k8s.io", ("storageclasses",), ("get", "list"), "doctor"),
    Right("coordination.k8s.io", ("leases",), ("get", "list"), "doctor: clocks and heartbeats of nodes"),
    Right("apps", ("deployments",), ("get", "list"), "doctor: the version of KubeRay's operator"),
    Right("apiextensions.k8s.io", ("customresourcedefinitions",), ("get", "list"), "cluster manifest --live, doctor"),
)
"""Reading only."""


def rules(rights: Sequence[Right]) -> list[dict[str, Any]]:
    """As a Role takes them."""
    return [
        {"apiGroups": [right.group], "resources": list(right.resources), "verbs": list(right.verbs)} for right in rights
    ]


def table(rights: Sequence[Right]) -> str:
    """For people: one line for each."""
    return "\n".join(f"- {', '.join(right.resources)}: {', '.join(right.verbs)} ({right.why})" for right in rights)
