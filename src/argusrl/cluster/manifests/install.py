"""The administrator's part: the controller, its rights and those of users, and what brings images to nodes early."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from argusrl.cluster.manifests import rights
from argusrl.cluster.manifests.access import CONTROLLER
from argusrl.cluster.manifests.document import Document, metadata
from argusrl.cluster.manifests.placement import HOST_TOPOLOGY, gone_tolerations, group_selector
from argusrl.cluster.manifests.setup import APPLICATION, COMPONENT_LABEL, HOME, NAME_LABEL
from argusrl.cluster.manifests.sizes import PodSize
from argusrl.cluster.manifests.storage import VOLUME, storage
from argusrl.config.cluster_sections import DNS_NAME, DNS_NAME_LENGTH, KubernetesSection
from argusrl.config.sections import Config
from argusrl.errors import ConfigError

Object = dict[str, Any]

SYSTEM_NAMESPACE = "argusrl-system"
CONTROLLER_NAME = "argusrl-controller"
USER_NAME = "argusrl-user"
PREPULL_NAME = "argusrl-prepull"

_RBAC = "rbac.authorization.k8s.io"
_LABELS = {NAME_LABEL: APPLICATION, COMPONENT_LABEL: CONTROLLER}
_SIZE = PodSize(0.5, 1 << 30)
_PREPULL_SIZE = PodSize(0.01, 16 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What an administrator decides."""

    kubernetes: KubernetesSection
    root: str  # folder with run folders, as pods see it
    namespace: str = SYSTEM_NAMESPACE
    run_namespaces: Sequence[str] = ()
    image: str = ""  # of the controller; the CPU image will do
    replicas: int = 1
    node_labels: Mapping[str, str] = field(default_factory=dict)  # of nodes for the controller; none: as the head's
    role_arn: str | None = None  # IAM role of the controller: SageMaker, SNS
    group: str | None = None  # of users, as Kubernetes knows them
    secrets: Mapping[str, str] = field(default_factory=dict)  # variable -> secret/key, e.g. of a webhook
    prepull: bool = False

    @property
    def namespaces(self) -> list[str]:
        """With runs, each once."""
        return list(dict.fromkeys(self.run_namespaces or [self.kubernetes.namespace]))


def installation_of(config: Config, **decisions: Any) -> Installation:
    """Image, file system and namespace are the recipe's. Raises ConfigError for a recipe without them."""
    kubernetes = config.cluster.kubernetes
    if kubernetes is None:
        raise ConfigError(
            "the recipe has no section cluster.kubernetes: image and file system of the controller are in it",
            "argusrl config explain cluster.kubernetes lists its keys",
        )
    return Installation(kubernetes=kubernetes, root=str(config.run.root), **decisions)


def install(wanted: Installation) -> list[Document]:
    """Every object, in the order they are to be created. Raises ConfigError where they would not work together."""
    _require_names(wanted)
    _require_one_file_system(wanted)
    places = dict.fromkeys([wanted.namespace, *wanted.namespaces])
    return [
        *_namespace(wanted),
        *_account(wanted),
        *(document for namespace in wanted.namespaces for document in _rights_in(wanted, namespace)),
        *_users(wanted),
        *(one for place in places for one in storage(wanted.kubernetes.volume, place, {NAME_LABEL: APPLICATION})),
        _isolation(wanted),
        _deployment(wanted),
        *(_prepull(wanted) if wanted.prepull else []),
    ]


def _require_names(wanted: Installation) -> None:
    names = {"--namespace": [wanted.namespace], "--run-namespace": wanted.namespaces}
    problems = [
        f"{option} {name}: a namespace has lower-case letters, digits and -, at most 63"
        for option, given in names.items()
        for name in given
        if not re.fullmatch(DNS_NAME, name) or len(name) > DNS_NAME_LENGTH
    ]
    if problems:
        raise ConfigError(problems)


def _require_one_file_system(wanted: Installation) -> None:
    """A storage class makes a file system for each claim, and claims are of one namespace."""
    others = [name for name in wanted.namespaces if name != wanted.namespace]
    if wanted.kubernetes.volume.storage_class is None or not others:
        return
    raise ConfigError(
        f"storage class {wanted.kubernetes.volume.storage_class} would make a second, empty file system for the "
        f"controller in {wanted.namespace}: runs are in {', '.join(wanted.namespaces)}",
        f"--namespace {others[0]} puts the controller where the runs are; or give volume.file_system_id, dns_name and "
        "mount_name of the file system that the class made",
    )


def _namespace(wanted: Installation) -> list[Document]:
    if wanted.namespace in wanted.namespaces:
        return []
    value = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": metadata(wanted.namespace, None, {NAME_LABEL: APPLICATION}),
    }
    return [Document(value, "Where the controller lives. Users need no rights in it.")]


def _account(wanted: Installation) -> list[Document]:
    annotations = {"eks.amazonaws.com/role-arn": wanted.role_arn} if wanted.role_arn else {}
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(CONTROLLER_NAME, wanted.namespace, _LABELS, **annotations),
    }
    role = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRole",
        "metadata": metadata(CONTROLLER_NAME, None, _LABELS),
        "rules": rights.rules(rights.CONTROLLER_CLUSTER),
    }
    binding = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": metadata(CONTROLLER_NAME, None, _LABELS),
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": CONTROLLER_NAME},
        "subjects": [_controller(wanted)],
    }
    return [
        Document(
            account,
            "The controller's account. Its IAM role (annotation, or EKS Pod Identity) needs, for HyperPod:\n"
            "sagemaker:ListClusterNodes, DescribeClusterNode, ListClusterEvents;\n"
            "BatchRebootClusterNodes and BatchReplaceClusterNodes only where recipes say cluster.replace_nodes: true;\n"
            "sns:Publish where they name a topic.",
        ),
        Document(
            role,
            f"What the controller reads of the whole cluster:\n{rights.table(rights.CONTROLLER_CLUSTER)}",
        ),
        Document(binding, "Gives it to the controller."),
    ]


def _rights_in(wanted: Installation, namespace: str) -> list[Document]:
    role = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": metadata(CONTROLLER_NAME, namespace, _LABELS),
        "rules": rights.rules(rights.CONTROLLER),
    }
    binding = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": metadata(CONTROLLER_NAME, namespace, _LABELS),
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": CONTROLLER_NAME},
        "subjects": [_controller(wanted)],
    }
    comment = f"What the controller does with runs in namespace {namespace}:\n{rights.table(rights.CONTROLLER)}"
    return [Document(role, comment), Document(binding, "Gives it to the controller.")]


def _users(wanted: Installation) -> list[Document]:
    labels = {NAME_LABEL: APPLICATION}
    reading = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRole",
        "metadata": metadata(USER_NAME, None, labels),
        "rules": rights.rules(rights.USER_CLUSTER),
    }
    documents = [
        Document(reading, f"What users read of the whole cluster:\n{rights.table(rights.USER_CLUSTER)}"),
    ]
    for namespace in wanted.namespaces:
        role = {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "Role",
            "metadata": metadata(USER_NAME, namespace, labels),
            "rules": rights.rules(rights.USER),
        }
        how = (
            f"To give it to people: kubectl -n {namespace} create rolebinding {USER_NAME} --role={USER_NAME} --group=…"
        )
        comment = f"What users do in namespace {namespace}:\n{rights.table(rights.USER)}"
        documents.append(Document(role, comment if wanted.group else f"{comment}\n{how}"))
    if wanted.group is None:
        return documents
    subject = {"kind": "Group", "apiGroup": _RBAC, "name": wanted.group}
    places: list[str | None] = [None, *wanted.namespaces]
    for place in places:
        scope = "" if place is not None else "Cluster"
        binding = {
            "apiVersion": f"{_RBAC}/v1",
            "kind": f"{scope}RoleBinding",
            "metadata": metadata(USER_NAME, place, labels),
            "roleRef": {"apiGroup": _RBAC, "kind": f"{scope}Role", "name": USER_NAME},
            "subjects": [subject],
        }
        documents.append(Document(binding, f"Gives it to group {wanted.group}."))
    return documents


def _controller(wanted: Installation) -> Object:
    return {"kind": "ServiceAccount", "name": CONTROLLER_NAME, "namespace": wanted.namespace}


def _isolation(wanted: Installation) -> Document:
    return Document(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(CONTROLLER_NAME, wanted.namespace, _LABELS),
            "spec": {"podSelector": {"matchLabels": _LABELS}, "policyTypes": ["Ingress"], "ingress": []},
        },
        "Nobody has to reach the controller: it asks, and is never asked.",
    )


def _deployment(wanted: Installation) -> Document:
    volume = wanted.kubernetes.volume
    pod: Object = {
        "serviceAccountName": CONTROLLER_NAME,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": volume.uid,
            "runAsGroup": volume.gid,
            "fsGroup": volume.gid,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **_nodes(wanted),
        "affinity": _apart(),
        "tolerations": gone_tolerations(),
        "containers": [_container(wanted)],
        "volumes": [
            {"name": VOLUME, "persistentVolumeClaim": {"claimName": volume.claim}},
            {"name": "home", "emptyDir": {}},
        ],
    }
    if wanted.kubernetes.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in wanted.kubernetes.image_pull_secrets]
    return Document(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata(CONTROLLER_NAME, wanted.namespace, _LABELS),
            "spec": {
                "replicas": wanted.replicas,
                "selector": {"matchLabels": _LABELS},
                "template": {"metadata": {"labels": dict(_LABELS)}, "spec": pod},
            },
        },
        "The controller: the only one that submits a run again. It goes where heads go (--node-label chooses other\n"
        "nodes), on a node without a Ray head if there is one, so that one fault takes both only where there is no\n"
        "other place; gone after 30 s from a node that does not answer. It keeps nothing: two replicas agree through\n"
        "the run folders.\n"
        f"Claim {volume.claim} of namespace {wanted.namespace} must show the runs' file system.",
    )


def _nodes(wanted: Installation) -> Object:
    """Where heads go: those nodes cost least, and a worker is asked for its node whole."""
    selector = dict(wanted.node_labels) or group_selector(wanted.kubernetes.head)
    return {"nodeSelector": selector} if selector else {}


def _apart() -> Object:
    """Preferred, never required: a required one keeps heads off, too, and the head of a lost node needs the other."""
    heads = {"labelSelector": {"matchLabels": {"ray.io/node-type": "head"}}, "namespaceSelector": {}}
    own = {"labelSelector": {"matchLabels": _LABELS}}
    return {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": weight, "podAffinityTerm": {**term, "topologyKey": HOST_TOPOLOGY}}
                for weight, term in ((100, heads), (50, own))
            ]
        }
    }


def _container(wanted: Installation) -> Object:
    fields = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "NODE_NAME": "spec.nodeName"}
    env: list[Object] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    env.append({"name": "HOME", "value": str(HOME)})
    for name, reference in sorted(wanted.secrets.items()):
        secret, _, key = reference.partition("/")
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return {
        "name": CONTROLLER,
        "image": wanted.image or wanted.kubernetes.image,
        "command": ["argusrl", "cluster", "watch", "--root", wanted.root, *_namespace_options(wanted)],
        "env": env,
        "resources": _SIZE.resources,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": VOLUME, "mountPath": str(wanted.kubernetes.volume.mount)},
            {"name": "home", "mountPath": str(HOME)},
        ],
    }


def _namespace_options(wanted: Installation) -> list[str]:
    return [word for namespace in wanted.namespaces for word in ("--namespace", namespace)]


def _prepull(wanted: Installation) -> list[Document]:
    """Where workers go and where heads go, which pull the same image."""
    kubernetes = wanted.kubernetes
    groups = {"workers": group_selector(kubernetes.workers), "heads": group_selector(kubernetes.head)}
    if not groups["heads"] or groups["heads"] == groups["workers"]:
        del groups["heads"]  # they go anywhere: which nodes that are nobody knows
    return [_holder(wanted, name, selector) for name, selector in groups.items()]


def _holder(wanted: Installation, group: str, selector: dict[str, str]) -> Document:
    labels = {NAME_LABEL: APPLICATION, COMPONENT_LABEL: f"prepull-{group}"}
    pod: Object = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "nodeSelector": selector,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "hold",
                "image": wanted.kubernetes.image,
                "command": ["sleep", "infinity"],
                "resources": _PREPULL_SIZE.resources,
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            }
        ],
    }
    if wanted.kubernetes.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in wanted.kubernetes.image_pull_secrets]
    return Document(
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": metadata(f"{PREPULL_NAME}-{group}", wanted.namespace, labels),
            "spec": {
                "selector": {"matchLabels": labels},
                "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        f"Keeps the image on the nodes of {group}, replacements included: a pod that has to pull ten gigabytes first\n"
        "starts minutes later. It sleeps, and takes 10 millicores.",
    )
