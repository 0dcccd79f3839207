"""Who may do what: the account that a run's pods have, and who may talk to them."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from argusrl.cluster.manifests.document import Document, metadata
from argusrl.cluster.manifests.setup import APPLICATION, COMPONENT_LABEL, NAME_LABEL, Setup
from argusrl.cluster.names import RUN_LABEL

DASHBOARD_PORT = 8265
GCS_PORT = 6379
METRICS_PORT = 8080
CONTROLLER = "controller"  # value of its component label

_MONITORING_AGENT_PORT = 8889  # of HyperPod, on the node
_POD_IDENTITY = "169.254.170.23/32"  # where EKS Pod Identity gives credentials
_STUDIO_NAMESPACES = ("hyperpod-ray", "jupyter-k8s-system")  # Ray endpoint operator; access of Studio's spaces
_PORTS_BY_SCHEME = {"http": 80, "https": 443}


def service_account(setup: Setup) -> Document:
    """The run's account: it has no rights in Kubernetes, and no token of it is mounted."""
    annotations = {}
    if setup.kubernetes.role_arn is not None:
        annotations["eks.amazonaws.com/role-arn"] = setup.kubernetes.role_arn
    return Document(
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": metadata(setup.run, setup.kubernetes.namespace, setup.run_labels, **annotations),
            "automountServiceAccountToken": False,
        },
        "The account of the run's pods. No role is bound to it and no token mounted: code in a pod can ask Kubernetes\n"
        "for nothing. AWS rights come from the role in its annotation, or from EKS Pod Identity.",
    )


def network_policy(setup: Setup) -> Document:
    """Ray asks nobody for a password: who reaches its dashboard or head can run code. So few may."""
    own = [{"podSelector": {"matchLabels": {RUN_LABEL: setup.run}}}]
    operator = {
        "namespaceSelector": _namespace(setup.kubernetes.operator_namespace),
        "podSelector": {"matchLabels": {NAME_LABEL: "kuberay-operator"}},
    }
    controller = {
        "namespaceSelector": _namespace(setup.kubernetes.controller_namespace),
        "podSelector": {"matchLabels": {NAME_LABEL: APPLICATION, COMPONENT_LABEL: CONTROLLER}},
    }
    dashboard: list[dict[str, Any]] = [operator, controller]
    if setup.kubernetes.studio != "off":
        dashboard += [{"namespaceSelector": _namespace(name)} for name in _STUDIO_NAMESPACES]
    anywhere = {"ipBlock": {"cidr": "0.0.0.0/0"}}
    egress: list[dict[str, Any]] = [
        {"to": own},
        {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]},
        {"to": [anywhere], "ports": [{"protocol": "TCP", "port": port} for port in _ports(setup)]},
        {"to": [{"ipBlock": {"cidr": _POD_IDENTITY}}], "ports": [{"protocol": "TCP", "port": 80}]},
    ]
    scrape = [{"protocol": "TCP", "port": port} for port in _metrics_ports(setup)]
    return Document(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(setup.run, setup.kubernetes.namespace, setup.run_labels),
            "spec": {
                "podSelector": {"matchLabels": {RUN_LABEL: setup.run}},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [
                    {"from": own},
                    {"from": dashboard, "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]},
                    {"from": [{"namespaceSelector": {}}], "ports": scrape},
                ],
                "egress": egress,
            },
        },
        "Ray's dashboard and job port take commands from everybody who reaches them, and a token is not to be had for\n"
        "RayJobs. So: pods of this run talk to each other (EFA and NCCL included), KubeRay's operator and the argusrl\n"
        "controller reach the dashboard, everybody may scrape metrics. Out: DNS, the ports below (S3 and the hub are\n"
        "443; 8889 is HyperPod's job monitoring agent on the node), AWS credentials of EKS Pod Identity. FSx is\n"
        "mounted by the node and not affected. Your own port-forward goes through the node and still works.\n"
        "cluster.kubernetes.egress_ports opens more.",
    )


def _namespace(name: str | None) -> dict[str, Any]:
    """A selector of one namespace, or of all."""
    return {} if name is None else {"matchLabels": {"kubernetes.io/metadata.name": name}}


def _metrics_ports(setup: Setup) -> list[int]:
    own = setup.config.observe.prometheus_port
    return [METRICS_PORT, *([own] if own else [])]


def _ports(setup: Setup) -> list[int]:
    """TCP ports anywhere that the recipe needs."""
    config = setup.config
    urls = [reward.url for reward in config.rewards if reward.url]
    urls += [config.observe.mlflow.uri] if config.observe.mlflow else []
    ports = {443, _MONITORING_AGENT_PORT, *setup.kubernetes.egress_ports}
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme in _PORTS_BY_SCHEME:
            ports.add(parts.port or _PORTS_BY_SCHEME[parts.scheme])
    return sorted(ports)
