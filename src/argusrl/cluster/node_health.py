"""What HyperPod says about a node: labels, annotations, conditions of its Kubernetes object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from argusrl.cluster.kube_api import Object, annotations_of, conditions_of, labels_of, name_of

PREFIX = "sagemaker.amazonaws.com/"
HEALTH = f"{PREFIX}node-health-status"
DEEP_CHECK = f"{PREFIX}deep-health-check-status"
CLUSTER_NAME = f"{PREFIX}cluster-name"
APPLICATION_REASON = "XidUserAppError"  # a program's own doing: no node is to blame

_FAULT_TYPES = (f"{PREFIX}fault-types", f"{PREFIX}fault-type")  # live clusters, and the guide's text
_FAULT_REASONS = (f"{PREFIX}fault-reasons", f"{PREFIX}fault-reason")
_FAULT_DETAILS = f"{PREFIX}fault-details"
_LEAVING = {"UnschedulablePendingReplacement": "replacement", "UnschedulablePendingReboot": "reboot"}
_NODE_NAME = re.compile(r"hyperpod-(i-[0-9a-f]{8,17})")
_OWN_CONDITIONS = frozenset({"Ready", "MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"})

Leaving = Literal["", "replacement", "reboot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFault:
    """One thing that HyperPod's health monitoring found."""

    type: str  # "NvidiaErrorTerminate"
    reason: str = ""  # "XidHardwareFailure"
    message: str = ""
    time: str = ""  # as it was written

    @property
    def application(self) -> bool:
        """Whether HyperPod judged a program to be the cause: the node stays."""
        return self.reason == APPLICATION_REASON


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHealth:
    """How a node stands. Empty words where HyperPod says nothing, as on nodes that are not its own."""

    name: str
    ready: bool
    status: str = ""  # "" | Schedulable | Unschedulable | UnschedulablePendingReplacement | …Reboot
    deep_check: str = ""  # "" | InProgress | Passed | Failed
    faults: tuple[NodeFault, ...] = ()
    cluster: str = ""  # HyperPod's
    instance: str = ""  # i-…, where the name says it

    @property
    def leaving(self) -> Leaving:
        """Whether HyperPod is about to replace or reboot it."""
        return _LEAVING.get(self.status, "")  # type: ignore[return-value]

    @property
    def healthy(self) -> bool:
        """By the rule of AWS's own checker; a fault of an application does not count."""
        blamed = [fault for fault in self.faults if not fault.application]
        return self.status in ("", "Schedulable") and self.deep_check in ("", "Passed") and not blamed

    def text(self) -> str:
        """One line for people; empty for a healthy node."""
        words = [] if self.ready else ["not ready"]
        if self.status not in ("", "Schedulable"):
            words.append(self.status)
        if self.deep_check not in ("", "Passed"):
            words.append(f"deep health check {self.deep_check}")
        words += [f"{fault.type} {fault.reason}: {fault.message}".rstrip(": ") for fault in self.faults]
        return ", ".join(words)


def node_health(node: Object) -> NodeHealth:
    """What a node object says. Unknown spellings count as nothing said, never as an error."""
    labels = labels_of(node)
    return NodeHealth(
        name=name_of(node),
        ready=conditions_of(node).get("Ready", {}).get("status") == "True",
        status=labels.get(HEALTH, ""),
        deep_check=labels.get(DEEP_CHECK, ""),
        faults=tuple(_faults(node)),
        cluster=labels.get(CLUSTER_NAME, ""),
        instance=instance_in(name_of(node)),
    )


def instance_in(node: str) -> str:
    """i-… of a node named hyperpod-i-…; empty for other names, which ListClusterNodes has to explain."""
    found = _NODE_NAME.fullmatch(node)
    return found[1] if found else ""


def _faults(node: Object) -> Iterable[NodeFault]:
    """From the annotation, which has most to say; else from conditions; else from the labels."""
    details = list(_annotated(annotations_of(node).get(_FAULT_DETAILS, "")))
    labels = labels_of(node)
    named = next((labels[key] for key in _FAULT_TYPES if labels.get(key)), "")
    conditions = [
        NodeFault(
            type=name,
            reason=str(condition.get("reason", "")),
            message=str(condition.get("message", "")),
            time=str(condition.get("lastTransitionTime", "")),
        )
        for name, condition in conditions_of(node).items()
        if condition.get("status") == "True" and name not in _OWN_CONDITIONS and name.startswith(("Nvidia", "Neuron"))
    ]
    if named and details:
        return details  # the annotation keeps old ones, too: the label says that there are any now
    if conditions or not named:
        return conditions
    reason = next((labels[key] for key in _FAULT_REASONS if labels.get(key)), "")
    return [NodeFault(type=named, reason=reason)]


def _annotated(text: str) -> Iterable[NodeFault]:
    try:
        entries: Any = json.loads(text or "[]")
    except ValueError:
        return
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            yield NodeFault(
                type=str(entry.get("type", "")),
                reason=str(entry.get("reason", "")),
                message=str(entry.get("message", "")),
                time=str(entry.get("timestamp", "")),
            )
