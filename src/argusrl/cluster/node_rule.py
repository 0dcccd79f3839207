"""What to do about a node that a run's own probes found wanting: pure functions of reports and of what was done before.

Hardware is blamed for an Xid of the hardware class that came again, for an uncorrected memory error, and for a device
that does not answer. A program's own Xid blames nobody. Storage that fails on several nodes at once is what is broken,
not the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from argusrl.journal.node_reports import Finding, NodeReport
from argusrl.journal.submissions import NodeAction

Step = Literal["notify", "drain", "reboot", "replace", "wait"]

LEAST_COUNT = {"xid": 2, "ecc": 1, "device_lost": 1}  # how often a finding is there before it counts
SEVERAL_NODES = 2
RECENT_SECONDS = 300.0  # before a report: what a node was last found with earlier than that is over


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A node whose hardware is blamed.

    `evidence` says on which start of Ray there, and what was found how often. A finding that lasts is told again with
    every reading; on a start that came after a reboot there is only what was found after it.
    """

    node: str
    pod: str
    text: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What else counts for a suspect."""

    allowed: bool  # cluster.replace_nodes
    alone: bool  # no pods of anybody else on it
    handled: bool  # HyperPod is about to replace or reboot it, or does
    instance: str  # empty where the node is none of HyperPod's
    drained: bool  # its pod is empty, or had its time to get there
    spent: int  # reboots and replacements for this run so far
    budget: int


def suspects(reports: Sequence[NodeReport]) -> list[Suspect]:
    """Nodes with hardware that is to blame, one entry each: by the newest start of Ray there that found something."""
    newest: dict[str, tuple[NodeReport, list[Finding]]] = {}
    for report in sorted(reports, key=lambda one: one.time):  # those of one node are by one clock
        blamed = [one for one in report.findings if _blames_hardware(one)]
        if blamed and report.node:
            newest[report.node] = report, blamed
    return [
        Suspect(
            node=node,
            pod=report.pod,
            text="; ".join(map(_occurrences, blamed)),
            evidence="; ".join([report.ray_node, *sorted(map(_occurrences, blamed))]),
        )
        for node, (report, blamed) in newest.items()
    ]


def storage_trouble(reports: Sequence[NodeReport]) -> tuple[bool, str]:
    """(whether storage itself is to blame, what is found now); an empty text is no trouble."""
    nodes = {
        report.node or report.address: one.text
        for report in reports
        for one in report.findings
        if one.cause == "storage" and report.alive and report.time - one.time <= RECENT_SECONDS
    }
    if not nodes:
        return False, ""
    text = "; ".join(f"{node}: {what}" for node, what in sorted(nodes.items()))
    return len(nodes) >= SEVERAL_NODES, text


def next_step(
    suspect: Suspect, standing: Standing, done: Sequence[NodeAction], answers: Mapping[str, bool]
) -> tuple[Step, str]:
    """What to do about a suspect now, and why.

    `done` are the actions for this run so far; `answers` says by their keys which were accepted, as far as is known.
    """
    if standing.handled:
        return "wait", "HyperPod is on it"
    if not standing.allowed:
        return "notify", "cluster.replace_nodes is false: nothing is done about it"
    if not standing.instance:
        return "notify", "it is no HyperPod instance"
    if not standing.alone:
        return "notify", "others have pods there: a person decides"
    before = {action.action: action for action in done if action.instance == standing.instance}
    if "replace" in before:
        return "wait", "its replacement was asked for"
    reboot = before.get("reboot")
    if reboot is not None and reboot.key not in answers:
        return "wait", "nobody knows yet what became of its reboot"
    if reboot is not None and not answers[reboot.key]:
        return "wait", "its reboot was refused: a person decides"
    if reboot is not None and _start_of(reboot.evidence) == _start_of(suspect.evidence):
        return "wait", "it was rebooted for this"
    if standing.spent >= standing.budget:
        return "notify", f"cluster.budget.replacements = {standing.budget} is spent"
    if not standing.drained:
        return "drain", "it is emptied first"
    return ("reboot", "a reboot comes first") if reboot is None else ("replace", "a reboot did not help")


def _start_of(evidence: str) -> str:
    """Ray's id of the node: another one after a reboot."""
    return evidence.partition(";")[0]


def _occurrences(finding: Finding) -> str:
    """What was found and how often. A device that does not answer is counted by readings, which says nothing."""
    return finding.text if finding.kind == "device_lost" else f"{finding.text} ({finding.count} times)"


def _blames_hardware(finding: Finding) -> bool:
    least = LEAST_COUNT.get(finding.kind)
    return finding.cause == "hardware" and least is not None and finding.count >= least
