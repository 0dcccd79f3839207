"""The checks against a cluster: the real client and an API server of the tests."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from argusrl.cluster.kinds import CLAIM, CONFIG_MAP, RAY_JOB
from argusrl.cluster.manifests.apply import apply_all, cluster_problems
from argusrl.cluster.manifests.live import live_problems
from argusrl.cluster.manifests.schema import ray_cluster_schema, ray_job_schema
from argusrl.errors import ClusterError
from fakes.kubernetes_api import ApiServer, Rule
from fakes.kubernetes_recipe import kubernetes_config, rendered

pytest.importorskip("kubernetes")


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as server:
        yield server


def crd(plural: str, schema: dict[str, Any], version: str = "v1") -> dict[str, Any]:
    kind = {"rayjobs": "RayJob", "rayclusters": "RayCluster"}[plural]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.ray.io"},
        "spec": {
            "group": "ray.io",
            "names": {"kind": kind, "plural": plural},
            "scope": "Namespaced",
            "versions": [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }


def operator(image: str = "quay.io/kuberay/operator:v1.7.0") -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "kuberay-operator"}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "kuberay-operator", "namespace": "default", "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "kuberay-operator", "image": image}]},
            },
        },
        "status": {"availableReplicas": 1},
    }


def with_kuberay(server: ApiServer, image: str = "quay.io/kuberay/operator:v1.7.0") -> None:
    server.store.seed(crd("rayjobs", ray_job_schema()))
    server.store.seed(crd("rayclusters", ray_cluster_schema()))
    server.store.seed(operator(image))


def documents() -> list[dict[str, Any]]:
    return copy.deepcopy(list(rendered(kubernetes_config()).values()))


def test_a_cluster_with_kuberay_takes_our_objects_and_keeps_none(server: ApiServer) -> None:
    with_kuberay(server)
    assert live_problems(documents(), server.connect()) == []
    assert server.store.objects(RAY_JOB) == []
    assert server.store.objects(CONFIG_MAP) == []


def test_without_kuberay_the_command_that_installs_it_is_said(server: ApiServer) -> None:
    found = live_problems(documents(), server.connect())
    assert ["helm install kuberay-operator" in problem for problem in found] == [True]


def test_an_older_operator_does_not_know_every_field(server: ApiServer) -> None:
    older = copy.deepcopy(ray_job_schema())
    del older["properties"]["spec"]["properties"]["preRunningDeadlineSeconds"]
    server.store.seed(crd("rayjobs", older))
    (found,) = live_problems(documents(), server.connect())
    assert "spec.preRunningDeadlineSeconds: there is no such field" in found


def test_an_operator_of_long_ago(server: ApiServer) -> None:
    server.store.seed(crd("rayjobs", ray_job_schema(), "v1alpha1"))
    (found,) = live_problems(documents(), server.connect())
    assert "served as v1alpha1; argusrl needs v1" in found


def test_what_the_server_refuses(server: ApiServer) -> None:
    with_kuberay(server)
    wrong = documents()
    wrong[0]["automountServiceAcountToken"] = False
    (found,) = live_problems(wrong, server.connect())
    assert found.startswith("ServiceAccount ")
    assert "automountServiceAcountToken" in found


def test_a_volume_that_an_administrator_made_needs_no_right_to_make_it(server: ApiServer) -> None:
    with_kuberay(server)
    server.rules.append(Rule(verb="patch", resource="persistentvolumes", status=403))
    server.store.seed(next(one for one in documents() if one["kind"] == "PersistentVolume"))
    assert live_problems(documents(), server.connect()) == []


def test_a_user_without_cluster_rights_needs_the_claim_bound(server: ApiServer) -> None:
    with_kuberay(server)
    server.rules.append(Rule(resource="persistentvolumes", status=403))
    (found,) = live_problems(documents(), server.connect())
    assert "an administrator applies it" in found
    claim = rendered(kubernetes_config())["PersistentVolumeClaim"]
    server.store.seed({**claim, "status": {"phase": "Bound"}})
    assert server.store.objects(CLAIM)
    assert live_problems(documents(), server.connect()) == []


def test_a_cluster_that_is_fit(server: ApiServer) -> None:
    with_kuberay(server)
    assert cluster_problems(server.connect()) == []


def test_a_cluster_that_is_not(server: ApiServer) -> None:
    server.git_version = "v1.25.3"
    names = [one.name for one in cluster_problems(server.connect())]
    assert names == ["api server", "crd RayJob", "crd RayCluster", "kuberay operator"]
    with_kuberay(server, "registry.example/kuberay/operator:v1.3.0")
    server.git_version = "v1.34.0"
    (found,) = cluster_problems(server.connect())
    assert "operator:v1.3.0 is too old" in found.detail


def test_objects_are_applied_in_order_and_again(server: ApiServer) -> None:
    with_kuberay(server)
    kube = server.connect()
    first = list(apply_all(documents(), kube))
    assert [line.split()[1] for line in first] == [document["kind"] for document in documents()]
    assert list(apply_all(documents(), kube)) == first
    assert len(server.store.objects(RAY_JOB)) == 1


def test_the_first_refusal_ends_it_and_names_the_object(server: ApiServer) -> None:
    with_kuberay(server)
    wrong = documents()
    wrong[1]["spec"]["policyTipes"] = []
    with pytest.raises(ClusterError, match="NetworkPolicy default/"):
        list(apply_all(wrong, server.connect()))
