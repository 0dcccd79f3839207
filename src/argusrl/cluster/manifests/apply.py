"""Applying objects to a live cluster, and whether it can hold argusrl at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from argusrl.cluster.doctor.access import check_server
from argusrl.cluster.doctor.finding import Finding, Subject, guarded
from argusrl.cluster.doctor.kuberay import check_crds, check_operator
from argusrl.cluster.kinds import CLAIM
from argusrl.cluster.kube_api import Denied, KubeApi, NotFound
from argusrl.errors import ClusterError


def cluster_problems(kube: KubeApi) -> list[Finding]:
    """Why the cluster cannot hold argusrl: its version, KubeRay's CRDs and operator. Empty where it can."""
    checks = {"api server": check_server, "crds": check_crds, "kuberay operator": check_operator}
    found = [one for name, check in checks.items() for one in guarded(name, check, Subject(kube))]
    return [one for one in found if one.result == "failed"]


def apply_all(documents: Sequence[dict[str, Any]], kube: KubeApi) -> Iterator[str]:
    """Apply in order, and say of each that it is there. Raises ClusterError at the first that is refused."""
    for document in documents:
        place = document["metadata"].get("namespace")
        where = f"{place}/" if place else ""
        label = f"{document['kind']} {where}{document['metadata']['name']}"
        try:
            kube.apply(document)
        except ClusterError as error:
            raise ClusterError(f"{label}: {error.message}", error.hint or "what came before it was applied") from error
        yield f"✓ {label}"


def places_without_claim(kube: KubeApi, claim: str, namespaces: Sequence[str]) -> list[str]:
    """Namespaces in which pods would wait for a claim that nobody has made. Raises KubeError."""
    missing = []
    for namespace in dict.fromkeys(namespaces):
        try:
            kube.get(CLAIM, claim, namespace)
        except NotFound:
            missing.append(namespace)
        except Denied:
            continue
    return missing
