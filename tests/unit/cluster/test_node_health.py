from __future__ import annotations

import json
from typing import Any

import pytest

from argusrl.cluster.node_health import NodeFault, instance_in, node_health

PREFIX = "sagemaker.amazonaws.com/"
XID_74 = "NVRM: Xid (PCI:0000:b9:00): 74"


def node(labels: dict[str, str] | None = None, **parts: Any) -> dict[str, Any]:
    own = {f"{PREFIX}{key}": value for key, value in (labels or {}).items()}
    annotations = {f"{PREFIX}{key}": value for key, value in parts.get("annotations", {}).items()}
    conditions = [{"type": "Ready", "status": "True"}, *parts.get("conditions", [])]
    return {
        "metadata": {"name": "hyperpod-i-0123456789abcdef0", "labels": own, "annotations": annotations},
        "status": {"conditions": conditions},
    }


def test_a_healthy_node():
    health = node_health(node({"node-health-status": "Schedulable", "deep-health-check-status": "Passed"}))
    assert health.healthy
    assert health.ready
    assert (health.leaving, health.text(), health.instance) == ("", "", "i-0123456789abcdef0")


def test_a_node_that_nobody_labelled_is_healthy():
    assert node_health(node()).healthy


@pytest.mark.parametrize(
    ("status", "leaving"),
    [
        ("UnschedulablePendingReplacement", "replacement"),
        ("UnschedulablePendingReboot", "reboot"),
        ("Unschedulable", ""),
        ("SomethingNew", ""),
    ],
)
def test_a_node_that_is_about_to_go(status, leaving):
    health = node_health(node({"node-health-status": status}))
    assert health.leaving == leaving
    assert not health.healthy
    assert status in health.text()


@pytest.mark.parametrize("keys", [("fault-types", "fault-reasons"), ("fault-type", "fault-reason")])
def test_faults_in_labels_under_both_spellings(keys):
    health = node_health(node(dict(zip(keys, ("NvidiaErrorTerminate", "XidHardwareFailure"), strict=True))))
    assert health.faults == (NodeFault(type="NvidiaErrorTerminate", reason="XidHardwareFailure"),)
    assert not health.healthy


def test_details_of_a_fault_come_from_the_annotation():
    details = [{"timestamp": "t", "type": "NvidiaErrorTerminate", "reason": "XidHardwareFailure", "message": XID_74}]
    health = node_health(
        node({"fault-types": "NvidiaErrorTerminate"}, annotations={"fault-details": json.dumps(details)})
    )
    assert health.faults[0].message == XID_74
    assert health.faults[0].time == "t"


def test_details_of_a_fault_that_is_over_are_history():
    details = json.dumps([{"type": "NvidiaErrorReboot", "reason": "XidHardwareFailure", "message": "m"}])
    assert node_health(node({"node-health-status": "Schedulable"}, annotations={"fault-details": details})).healthy


def test_a_fault_may_show_as_a_condition_alone():
    condition = {"type": "NvidiaErrorReboot", "status": "True", "reason": "XidHardwareFailure", "message": XID_74}
    assert node_health(node(conditions=[condition])).faults[0].message == XID_74
    assert node_health(node(conditions=[{**condition, "status": "False"}])).healthy


def test_conditions_of_the_kubelet_are_no_faults():
    assert node_health(node(conditions=[{"type": "DiskPressure", "status": "True"}])).healthy


def test_what_a_program_did_is_not_the_nodes_fault():
    health = node_health(node({"fault-types": "NvidiaErrorReboot", "fault-reasons": "XidUserAppError"}))
    assert health.healthy
    assert health.faults[0].application


def test_nonsense_in_the_annotation_is_nothing_said():
    for text in ("{", "3", "[1]", '{"a": 1}'):
        assert node_health(node(annotations={"fault-details": text})).healthy


@pytest.mark.parametrize(
    ("name", "instance"),
    [("hyperpod-i-0123456789abcdef0", "i-0123456789abcdef0"), ("ip-10-0-0-1.ec2.internal", ""), ("hyperpod-i-xyz", "")],
)
def test_which_instance_a_node_is(name, instance):
    assert instance_in(name) == instance
