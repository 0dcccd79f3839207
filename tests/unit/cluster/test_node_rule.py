from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from argusrl.cluster.node_rule import Standing, Suspect, next_step, storage_trouble, suspects
from argusrl.journal.node_reports import Finding, NodeReport
from argusrl.journal.submissions import NodeAction


def report(node: str, *findings: Finding) -> NodeReport:
    return NodeReport(
        ray_node=node, address="10.0.0.1", head=False, pod=f"pod-{node}", node=node, findings=list(findings)
    )


def finding(kind: str, cause: str = "hardware", count: int = 1, **fields: Any) -> Finding:
    return Finding(kind=kind, cause=cause, text=f"{kind} happened", time=5.0, count=count, **fields)


class TestSuspects:
    @pytest.mark.parametrize(
        "one",
        [finding("xid", count=2), finding("ecc"), finding("device_lost")],
        ids=lambda one: one.kind,
    )
    def test_hardware_is_blamed(self, one):
        (suspect,) = suspects([report("n", one), report("other")])
        assert (suspect.node, suspect.pod) == ("n", "pod-n")
        assert "happened" in suspect.text

    @pytest.mark.parametrize(
        "one",
        [
            finding("xid"),  # once may be chance
            finding("xid", "application", 99),
            finding("xid", "unknown", 99),
            finding("temperature", count=99),
            finding("storage", "storage", 99),
            finding("memory", "resources", 99),
        ],
        ids=lambda one: f"{one.kind}-{one.cause}",
    )
    def test_nothing_else_is(self, one):
        assert suspects([report("n", one)]) == []

    def test_evidence_changes_when_more_is_found(self):
        (before,) = suspects([report("n", finding("ecc"))])
        (after,) = suspects([report("n", finding("ecc", count=2))])
        assert before.evidence != after.evidence


class TestStorage:
    def test_several_nodes_condemn_the_storage(self):
        bad = finding("storage", "storage")
        condemned, text = storage_trouble([report("a", bad), report("b", bad), report("c")])
        assert condemned
        assert "a: " in text

    def test_one_node_is_that_nodes_trouble(self):
        condemned, text = storage_trouble([report("a", finding("storage", "storage")), report("b")])
        assert not condemned
        assert text

    def test_no_trouble_is_no_text(self):
        assert storage_trouble([report("a", finding("ecc"))]) == (False, "")


SUSPECT = Suspect(node="n", pod="p", text="ecc", evidence="e1")
FREE = Standing(allowed=True, alone=True, handled=False, instance="i-1", drained=True, spent=0, budget=4)


def action(what: str, evidence: str = "e0", instance: str = "i-1") -> NodeAction:
    return NodeAction(action=what, node="n", instance=instance, reason="", time=0.0, evidence=evidence)


@pytest.mark.parametrize(
    ("standing", "done", "step"),
    [
        (FREE, [], "reboot"),
        (FREE, [action("reboot", "e1")], "wait"),  # nothing new was found since
        (FREE, [action("reboot")], "replace"),
        (FREE, [action("reboot"), action("replace")], "wait"),
        (FREE, [action("replace", instance="i-0")], "reboot"),  # that was another instance
        (replace(FREE, drained=False), [], "drain"),
        (replace(FREE, drained=False), [action("reboot")], "drain"),
        (replace(FREE, allowed=False), [], "notify"),
        (replace(FREE, alone=False), [], "notify"),
        (replace(FREE, instance=""), [], "notify"),
        (replace(FREE, spent=4), [], "notify"),
        (replace(FREE, handled=True), [], "wait"),
        (replace(FREE, handled=True, allowed=False), [], "wait"),
    ],
)
def test_what_is_done_about_a_suspect(standing, done, step):
    found, why = next_step(SUSPECT, standing, done)
    assert found == step
    assert why
