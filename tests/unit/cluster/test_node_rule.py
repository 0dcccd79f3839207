from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from argusrl.cluster.node_rule import Standing, Suspect, next_step, storage_trouble, suspects
from argusrl.journal.node_reports import Finding, NodeReport
from argusrl.journal.submissions import NodeAction


def report(node: str, *findings: Finding, ray_node: str = "ray-1", time: float = 10.0, **fields: Any) -> NodeReport:
    return NodeReport(
        ray_node=ray_node, address="10.0.0.1", head=False, pod=f"pod-{node}", node=node, time=time,
        findings=list(findings), **fields,
    )  # fmt: skip


def finding(kind: str, cause: str = "hardware", count: int = 1, time: float = 5.0) -> Finding:
    return Finding(kind=kind, cause=cause, text=f"{kind} happened", time=time, count=count)


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

    @pytest.mark.parametrize("kind", ["ecc", "device_lost"])
    def test_a_finding_that_lasts_is_no_new_evidence(self, kind):
        """Each reading tells it again, with its own time; one of a device that is lost counts up, too."""
        later = finding(kind, count=7 if kind == "device_lost" else 1, time=65.0)
        assert suspects([report("n", finding(kind))]) == suspects([report("n", later, time=70.0)])

    def test_evidence_says_what_and_how_often(self):
        (suspect,) = suspects([report("n", finding("xid", count=2), finding("ecc"))])
        assert suspect.evidence == "ray-1; ecc happened (1 times); xid happened (2 times)"

    def test_a_node_that_came_back_is_judged_by_what_it_has_shown_since(self):
        gone = report("n", finding("ecc", count=3), alive=False)
        (unchanged,) = suspects([report("n", ray_node="ray-2", time=300.0), gone])
        assert unchanged == suspects([gone])[0]
        (again,) = suspects([report("n", finding("ecc"), ray_node="ray-2", time=300.0), gone])
        assert again.evidence == "ray-2; ecc happened (1 times)"


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

    def test_what_is_over_is_not_added_up(self):
        """Six seconds on one node, and the same on another one ten hours later."""
        now = report("b", finding("storage", "storage", time=36_000.0), time=36_002.0)
        condemned, text = storage_trouble([report("a", finding("storage", "storage"), time=36_002.0), now])
        assert not condemned
        assert "a: " not in text

    def test_a_node_that_is_gone_says_nothing_any_more(self):
        bad = finding("storage", "storage")
        assert storage_trouble([report("a", bad, alive=False)]) == (False, "")

    def test_no_trouble_is_no_text(self):
        assert storage_trouble([report("a", finding("ecc"))]) == (False, "")


SUSPECT = Suspect(node="n", pod="p", text="ecc", evidence="ray-2; ecc")
FREE = Standing(allowed=True, alone=True, handled=False, instance="i-1", drained=True, spent=0, budget=4)


BEFORE, SINCE = "ray-1; ecc", "ray-2; xid"  # evidence on the start of Ray before the one that is suspect, and on it
DONE, REFUSED = {"reboot-i-1": True}, {"reboot-i-1": False}


def action(what: str, evidence: str = BEFORE, instance: str = "i-1") -> NodeAction:
    return NodeAction(action=what, node="n", instance=instance, reason="", time=0.0, evidence=evidence)


@pytest.mark.parametrize(
    ("standing", "done", "answers", "step"),
    [
        (FREE, [], {}, "reboot"),
        (FREE, [action("reboot", SINCE)], DONE, "wait"),  # Ray there is still the one of before
        (FREE, [action("reboot")], DONE, "replace"),
        (FREE, [action("reboot")], REFUSED, "wait"),  # what was not done cannot have failed to help
        (FREE, [action("reboot")], {}, "wait"),
        (FREE, [action("reboot"), action("replace")], DONE, "wait"),
        (FREE, [action("replace", instance="i-0")], {}, "reboot"),  # that was another instance
        (replace(FREE, drained=False), [], {}, "drain"),
        (replace(FREE, drained=False), [action("reboot")], DONE, "drain"),
        (replace(FREE, allowed=False), [], {}, "notify"),
        (replace(FREE, alone=False), [], {}, "notify"),
        (replace(FREE, instance=""), [], {}, "notify"),
        (replace(FREE, spent=4), [], {}, "notify"),
        (replace(FREE, handled=True), [], {}, "wait"),
        (replace(FREE, handled=True, allowed=False), [], {}, "wait"),
    ],
)
def test_what_is_done_about_a_suspect(standing, done, answers, step):
    found, why = next_step(SUSPECT, standing, done, answers)
    assert found == step
    assert why
