"""boto3 against botocore's own description of the service: names, types and unknown keys are checked by it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from moto import mock_aws

from argusrl.cluster.hyperpod import HyperPod, Instance, connect
from argusrl.errors import ClusterError

ONE, OTHER = "i-0123456789abcdef0", "i-0fedcba9876543210"


@pytest.fixture
def service(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    client = boto3.client("sagemaker", region_name="us-west-2")
    with Stubber(client) as stub:
        yield HyperPod("ml", client), stub
        stub.assert_no_pending_responses()


def summary(instance: str, **changes: Any) -> dict[str, Any]:
    return {
        "InstanceGroupName": "workers",
        "InstanceId": instance,
        "NodeLogicalId": "node-1",
        "InstanceType": "ml.g7e.12xlarge",
        "LaunchTime": datetime(2026, 11, 1, tzinfo=UTC),
        "InstanceStatus": {"Status": "Running", "Message": ""},
        "PrivateDnsHostname": "ip-10-0-0-1.us-west-2.compute.internal",
        **changes,
    }


def test_all_pages_of_instances(service):
    pod, stub = service
    stub.add_response(
        "list_cluster_nodes",
        {"ClusterNodeSummaries": [summary(ONE)], "NextToken": "more"},
        {"ClusterName": "ml", "MaxResults": 100},
    )
    stub.add_response(
        "list_cluster_nodes",
        {"ClusterNodeSummaries": [summary(OTHER)]},
        {"ClusterName": "ml", "MaxResults": 100, "NextToken": "more"},
    )
    assert [one.instance for one in pod.instances()] == [ONE, OTHER]


def test_a_node_is_found_by_its_name_without_a_question(service):
    pod, _ = service
    assert pod.instance_of(f"hyperpod-{ONE}") == ONE


def test_an_older_name_is_looked_up(service):
    pod, stub = service
    for _ in range(2):
        stub.add_response("list_cluster_nodes", {"ClusterNodeSummaries": [summary(ONE)]})
    assert pod.instance_of("ip-10-0-0-1.us-west-2.compute.internal") == ONE
    assert pod.instance_of("ip-10-0-0-9.us-west-2.compute.internal") == ""


def test_how_an_instance_stands(service):
    pod, stub = service
    details = {"InstanceId": ONE, "InstanceGroupName": "workers", "InstanceStatus": {"Status": "ShuttingDown"}}
    stub.add_response("describe_cluster_node", {"NodeDetails": details}, {"ClusterName": "ml", "NodeId": ONE})
    assert pod.describe(ONE).gone


def test_an_instance_that_the_cluster_does_not_have_is_gone(service):
    pod, stub = service
    stub.add_client_error("describe_cluster_node", "ResourceNotFound", "no such node", http_status_code=404)
    assert pod.describe(ONE) == Instance(instance=ONE, status="NotFound")


@pytest.mark.parametrize("status", ["Running", "Failure", "Pending", "SystemUpdating"])
def test_other_states_are_not_gone(status):
    assert not Instance(instance=ONE, status=status).gone


def test_success_of_the_request_says_nothing_about_a_node(service):
    pod, stub = service
    answer = {
        "Successful": [ONE],
        "Failed": [{"NodeId": OTHER, "ErrorCode": "InvalidInstanceStatus", "Message": "not replaceable"}],
    }
    stub.add_response("batch_replace_cluster_nodes", answer, {"ClusterName": "ml", "NodeIds": [ONE, OTHER]})
    first, second = pod.repair("replace", [ONE, OTHER])
    assert first.accepted
    assert not second.accepted
    assert (second.code, second.message) == ("InvalidInstanceStatus", "not replaceable")


def test_a_node_that_the_answer_does_not_name_was_not_accepted(service):
    pod, stub = service
    stub.add_response("batch_reboot_cluster_nodes", {}, {"ClusterName": "ml", "NodeIds": [ONE]})
    (answer,) = pod.repair("reboot", [ONE])
    assert not answer.accepted
    assert "does not name it" in answer.message


def test_many_nodes_go_in_several_requests(service):
    pod, stub = service
    nodes = [f"i-{number:017x}" for number in range(30)]
    for part in (nodes[:25], nodes[25:]):
        stub.add_response("batch_reboot_cluster_nodes", {"Successful": part}, {"ClusterName": "ml", "NodeIds": part})
    assert [one.accepted for one in pod.repair("reboot", nodes)] == [True] * 30


def test_a_refused_request_says_who_has_to_allow_it(service):
    pod, stub = service
    stub.add_client_error("batch_reboot_cluster_nodes", "AccessDeniedException", "not authorized")
    with pytest.raises(ClusterError, match="not authorized") as caught:
        pod.repair("reboot", [ONE])
    assert "role" in caught.value.hint


def test_clusters_without_events_have_none(service):
    pod, stub = service
    stub.add_client_error("list_cluster_events", "ValidationException", "only with continuous provisioning")
    assert pod.events() is None


def test_events_of_an_instance(service):
    pod, stub = service
    event = {
        "EventId": "83ea0bb5-be77-45e8-a458-0a87f778a205",
        "ClusterArn": "arn:aws:sagemaker:us-west-2:111122223333:cluster/abcdefghijkl",
        "ClusterName": "ml",
        "ResourceType": "Instance",
        "EventTime": datetime(2026, 11, 1, tzinfo=UTC),
        "Description": "replaced",
    }
    expected = {"ClusterName": "ml", "MaxResults": 5, "NodeId": ONE}
    stub.add_response("list_cluster_events", {"Events": [event]}, expected)
    assert pod.events(ONE, most=5)[0]["Description"] == "replaced"


def test_without_a_region_it_says_so(monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(ClusterError, match="region"):
        connect("ml")


def test_the_client_never_repeats_a_request_by_itself(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    assert connect("ml", "us-west-2").client.meta.config.retries["total_max_attempts"] == 1


@mock_aws
def test_against_a_service_that_keeps_clusters(monkeypatch):
    """moto keeps clusters and their nodes; it does not know the batch operations."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    pod = connect("ml", "us-west-2")
    pod.client.create_cluster(
        ClusterName="ml",
        InstanceGroups=[
            {
                "InstanceCount": 2,
                "InstanceGroupName": "workers",
                "InstanceType": "ml.p4d.24xlarge",
                "LifeCycleConfig": {"SourceS3Uri": "s3://sagemaker-lifecycle", "OnCreate": "on_create.sh"},
                "ExecutionRole": "arn:aws:iam::111122223333:role/hyperpod",
                "ThreadsPerCore": 1,
            }
        ],
    )
    instances = pod.instances()
    assert [one.group for one in instances] == ["workers", "workers"]
    assert pod.describe(instances[0].instance).group == "workers"
