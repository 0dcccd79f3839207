"""What a live cluster says to objects, without creating any: its own CRDs, and a dry run of its API server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from argusrl.cluster.kinds import CLAIM, CRD, Kind, kind_of
from argusrl.cluster.kube_api import Denied, KubeApi, NotFound, Refused, name_of
from argusrl.cluster.kuberay_release import KUBERAY_INSTALL
from argusrl.cluster.manifests.check import label_of, unchecked
from argusrl.cluster.manifests.schema import schema_problems, unknown_fields, with_defaults
from argusrl.errors import ConfigError

Object = dict[str, Any]


def live_problems(documents: Sequence[Object], kube: KubeApi) -> list[str]:
    """Everything that this cluster would refuse. Raises ClusterError when it cannot be asked."""
    found = []
    for document in documents:
        if not unchecked(document):
            found += [f"{label_of(document)}: {problem}" for problem in _problems(document, kube)]
    return found


def _problems(document: Object, kube: KubeApi) -> list[str]:
    try:
        kind = kind_of(document)
    except ConfigError as error:
        return [error.message]
    found: list[str] = []
    if kind.group == "ray.io":
        found = _by_crd(document, f"{kind.plural}.{kind.group}", kube)
        if found:
            return found
    try:
        kube.apply(document, dry_run=True)
    except Denied as error:
        if kind.namespaced or not _is_there(kind, document, kube):
            found.append(f"{error.message}; an administrator applies it")
    except (Refused, NotFound) as error:
        found.append(error.message)
    return found


def _by_crd(document: Object, name: str, kube: KubeApi) -> list[str]:
    """Against the CRD of the operator that is there, which may be older than the one that is known here."""
    try:
        crd = kube.get(CRD, name)
    except NotFound:
        return [f"there is no {name}: KubeRay is not installed ({KUBERAY_INSTALL})"]
    except Denied:
        return []  # the dry run says as much, in other words
    versions = {version["name"]: version for version in crd["spec"]["versions"] if version.get("served")}
    if "v1" not in versions:
        return [
            f"{name} is served as {', '.join(versions)}; argusrl needs v1: KubeRay 1.6 or later ({KUBERAY_INSTALL})"
        ]
    schema = versions["v1"]["schema"]["openAPIV3Schema"]
    filled = with_defaults(document, schema)
    known = {**schema, "properties": {**schema["properties"], "metadata": {}}}
    return [*schema_problems(filled, schema), *unknown_fields(filled, known)]


def _is_there(kind: Kind, document: Object, kube: KubeApi) -> bool:
    """Whether submitting would leave it as it is, so that nobody needs the right to create it."""
    try:
        kube.get(kind, name_of(document))
    except (NotFound, Denied):
        return _bound(document, kube)
    return True


def _bound(volume: Object, kube: KubeApi) -> bool:
    """Whether the claim that a static volume is for is bound already: then nobody has to create the volume."""
    claim = volume.get("spec", {}).get("claimRef")
    if claim is None:
        return False
    try:
        status = kube.get(CLAIM, claim["name"], claim["namespace"]).get("status") or {}
    except (NotFound, Denied):
        return False
    return bool(status.get("phase") == "Bound")
