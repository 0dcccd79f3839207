"""SageMaker HyperPod's own API: which instance a node is, how it stands, and asking for a reboot or a replacement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from argusrl.cluster.node_health import instance_in
from argusrl.errors import ClusterError

Repair = Literal["reboot", "replace"]
_OPERATIONS = {"reboot": "batch_reboot_cluster_nodes", "replace": "batch_replace_cluster_nodes"}
_MOST_NODES = 25  # of one request
_GOING = frozenset({"ShuttingDown", "NotFound"})  # states in which nothing runs on an instance any more
_NO_SUCH = ("ResourceNotFound", "ResourceNotFoundException")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One instance of a HyperPod cluster."""

    instance: str  # i-…: another one after a replacement
    group: str = ""
    status: str = ""  # Running | Failure | Pending | ShuttingDown | SystemUpdating | …
    message: str = ""
    host: str = ""  # private DNS name

    @property
    def gone(self) -> bool:
        """Whether HyperPod says that nothing runs there any more."""
        return self.status in _GOING


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairAnswer:
    """What the service said about one node. A request succeeds with HTTP 200 even where it fails for every node."""

    instance: str
    accepted: bool
    code: str = ""  # InstanceIdNotFound | InvalidInstanceStatus | InstanceIdInUse | InternalServerError
    message: str = ""


@dataclass(slots=True)
class HyperPod:
    """One cluster. Every method raises ClusterError where the service does not answer or refuses."""

    cluster: str
    client: Any  # boto3's client of sagemaker

    def instances(self) -> list[Instance]:
        """All instances of the cluster."""
        found: list[Instance] = []
        token: dict[str, str] = {}
        while True:
            with _answered(f"ListClusterNodes of {self.cluster}"):
                page = self.client.list_cluster_nodes(ClusterName=self.cluster, MaxResults=100, **token)
            found += [_instance(summary) for summary in page["ClusterNodeSummaries"]]
            if not page.get("NextToken"):
                return found
            token = {"NextToken": page["NextToken"]}

    def instance_of(self, node: str) -> str:
        """The instance id of a Kubernetes node: from its name, or by its DNS name; empty if there is none."""
        named = instance_in(node)
        if named:
            return named
        return next((one.instance for one in self.instances() if one.host in (node, f"{node}.")), "")

    def describe(self, instance: str) -> Instance:
        """One instance; status NotFound if the cluster does not have it."""
        try:
            with _answered(f"DescribeClusterNode {instance}"):
                answer = self.client.describe_cluster_node(ClusterName=self.cluster, NodeId=instance)
        except ClusterError as error:
            if _code(error.__cause__) in _NO_SUCH:
                return Instance(instance=instance, status="NotFound")
            raise
        return _instance(answer["NodeDetails"])

    def repair(self, action: Repair, instances: Sequence[str]) -> list[RepairAnswer]:
        """Reboot or replace instances (replacing destroys their volumes); what was said about each."""
        answers: list[RepairAnswer] = []
        for start in range(0, len(instances), _MOST_NODES):
            part = list(instances[start : start + _MOST_NODES])
            with _answered(f"{action} {', '.join(part)}"):
                answer = getattr(self.client, _OPERATIONS[action])(ClusterName=self.cluster, NodeIds=part)
            refused = {failure["NodeId"]: failure for failure in answer.get("Failed") or []}
            accepted = set(answer.get("Successful") or [])
            for one in part:
                failure = refused.get(one, {})
                answers.append(
                    RepairAnswer(
                        instance=one,
                        accepted=one in accepted and one not in refused,
                        code=str(failure.get("ErrorCode", "")),
                        message=str(failure.get("Message", "" if one in accepted else "the answer does not name it")),
                    )
                )
        return answers

    def events(self, instance: str | None = None, most: int = 100) -> list[Mapping[str, Any]] | None:
        """Newest first; None where this cluster keeps none (its nodes are not provisioned continuously)."""
        node = {"NodeId": instance} if instance is not None else {}
        try:
            with _answered(f"ListClusterEvents of {self.cluster}"):
                answer = self.client.list_cluster_events(ClusterName=self.cluster, MaxResults=min(most, 100), **node)
        except ClusterError as error:
            if _code(error.__cause__) == "ValidationException":
                return None
            raise
        return list(answer.get("Events") or [])


def connect(cluster: str, region: str | None = None) -> HyperPod:
    """By the credentials of this process (EKS Pod Identity, IRSA, profile). Raises ClusterError."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ClusterError("the boto3 package is missing", "pip install 'argusrl[cluster]'") from error
    # No retries by the client: a reboot whose answer was lost would happen twice. Everything else is asked for again.
    settings = Config(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 1})
    try:
        return HyperPod(cluster, boto3.client("sagemaker", region_name=region, config=settings))
    except (BotoCoreError, ValueError) as error:
        raise ClusterError(f"no client for SageMaker: {error}", "set AWS_REGION, or give --region") from error


def _instance(details: Mapping[str, Any]) -> Instance:
    status = details.get("InstanceStatus") or {}
    return Instance(
        instance=str(details.get("InstanceId", "")),
        group=str(details.get("InstanceGroupName", "")),
        status=str(status.get("Status", "")),
        message=str(status.get("Message", "")),
        host=str(details.get("PrivateDnsHostname", "")),
    )


@contextmanager
def _answered(what: str) -> Iterator[None]:
    """Turns what botocore raises into a ClusterError with the service's own words."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        denied = "AccessDenied" in _code(error)
        hint = "the controller's role needs this right: docs/hyperpod.md lists them" if denied else ""
        raise ClusterError(f"{what}: {error.response.get('Error', {}).get('Message') or error}", hint) from error
    except BotoCoreError as error:
        raise ClusterError(f"{what}: {error}", "check region, credentials and the way to the endpoint") from error


def _code(error: BaseException | None) -> str:
    response = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
