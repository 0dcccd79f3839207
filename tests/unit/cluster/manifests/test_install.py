from __future__ import annotations

from typing import Any

import pytest

from argusrl.cluster.doctor.access import NEEDED, WANTED
from argusrl.cluster.manifests.check import problems_of
from argusrl.cluster.manifests.document import Document
from argusrl.cluster.manifests.install import install, installation_of
from argusrl.config.load import load_config
from argusrl.errors import ConfigError
from fakes.kubernetes_recipe import ROOT, kubernetes_config


def objects(**decisions: Any) -> list[Document]:
    return install(installation_of(kubernetes_config(), **decisions))


def one(documents: list[Document], kind: str, name: str = "argusrl-controller") -> dict[str, Any]:
    (found,) = [d.value for d in documents if d.kind == kind and d.value["metadata"]["name"] == name]
    return found


@pytest.mark.parametrize(
    "decisions",
    [
        {},
        {"namespace": "default"},
        {"run_namespaces": ["team-a", "team-b"], "group": "research", "replicas": 2},
        {"prepull": True, "role_arn": "arn:aws:iam::123456789012:role/c", "secrets": {"HOOK": "hook/url"}},
    ],
)
def test_every_installation_is_valid(decisions: dict[str, Any]) -> None:
    documents = objects(**decisions)
    names = [(d.kind, d.value["metadata"].get("namespace"), d.value["metadata"]["name"]) for d in documents]
    assert len(set(names)) == len(names)
    for document in documents:
        assert problems_of(document.value) == []
        if document.kind == "Namespace":
            assert document is documents[0]


def test_the_controller_goes_where_heads_go_and_off_their_nodes_if_it_can() -> None:
    """A required anti-affinity would keep the head of a lost node off the only other node of their group."""
    pod = one(objects(), "Deployment")["spec"]["template"]["spec"]
    (repulsion,) = pod["affinity"].values()
    (terms,) = repulsion.values()
    assert list(repulsion) == ["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [term["weight"] for term in terms] == [100, 50]
    assert terms[0]["podAffinityTerm"]["labelSelector"]["matchLabels"] == {"ray.io/node-type": "head"}
    assert terms[0]["podAffinityTerm"]["namespaceSelector"] == {}  # heads of all namespaces
    assert pod["nodeSelector"] == {
        "node.kubernetes.io/instance-type": "ml.m5.4xlarge",
        "sagemaker.amazonaws.com/instance-group-name": "head",
    }
    other = one(objects(node_labels={"team": "ops"}), "Deployment")["spec"]["template"]["spec"]
    assert other["nodeSelector"] == {"team": "ops"}


def test_the_controllers_command() -> None:
    pod = one(objects(), "Deployment")["spec"]["template"]["spec"]
    assert {t["tolerationSeconds"] for t in pod["tolerations"]} == {30}
    container = pod["containers"][0]
    assert container["command"] == [
        *("argusrl", "cluster", "watch", "--root", "/fsx/argusrl/runs", "--namespace", "default")
    ]
    assert container["volumeMounts"][0]["mountPath"] == "/fsx"


def test_the_controller_may_do_what_it_needs_and_no_more() -> None:
    documents = objects(run_namespaces=["team-a"])
    cluster = one(documents, "ClusterRole")["rules"]
    assert {verb for rule in cluster for verb in rule["verbs"]} <= {"get", "list", "watch"}
    assert {what for rule in cluster for what in rule["resources"]} == {"nodes", "pods"}
    role = one(documents, "Role")
    assert role["metadata"]["namespace"] == "team-a"
    granted = {
        (group, what, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for what in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {("ray.io", "rayjobs", "create"), ("ray.io", "rayjobs", "delete"), ("", "pods", "delete")} <= granted
    forbidden = {"secrets", "pods/exec", "pods/eviction", "nodes", "roles", "rolebindings"}
    assert not {what for _, what, _ in granted} & forbidden
    assert not {verb for _, _, verb in granted} & {"*", "deletecollection", "impersonate"}


def test_users_get_what_doctor_asks_for() -> None:
    """doctor says which rights a sub-verb needs: the role grants them all, so nobody has to guess."""
    documents = objects()
    granted = {
        (verb, group, resource)
        for kind in ("Role", "ClusterRole")
        for rule in one(documents, kind, "argusrl-user")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    for needed in (*NEEDED.values(), *WANTED.values()):
        for verb, kind, sub in needed:
            resource = f"{kind.plural}/{sub}" if sub else kind.plural
            assert (verb, kind.group, resource) in granted, (verb, kind.group, resource)


def test_nobody_gets_secrets() -> None:
    for document in objects(group="research"):
        for rule in document.value.get("rules", []):
            assert "secrets" not in rule["resources"]
            assert "*" not in rule["resources"] + rule["verbs"] + rule["apiGroups"]


def test_bindings_name_roles_that_are_there() -> None:
    documents = objects(run_namespaces=["team-a", "team-b"], group="research")
    roles = {(d.kind, d.value["metadata"].get("namespace"), d.value["metadata"]["name"]) for d in documents}
    bindings = [d.value for d in documents if d.kind.endswith("RoleBinding")]
    assert len(bindings) == 1 + 2 + 1 + 2
    for binding in bindings:
        wanted = (binding["roleRef"]["kind"], binding["metadata"].get("namespace"), binding["roleRef"]["name"])
        assert wanted in roles
        for subject in binding["subjects"]:
            account = ("ServiceAccount", subject.get("namespace"), subject["name"])
            assert subject["kind"] == "Group" or account in roles


def test_users_are_bound_only_when_a_group_is_named() -> None:
    assert not [d for d in objects() if d.kind.endswith("Binding") and d.value["metadata"]["name"] == "argusrl-user"]
    assert "create rolebinding" in next(
        d.comment for d in objects() if d.kind == "Role" and d.value["metadata"]["name"] == "argusrl-user"
    )


def test_the_file_system_is_mounted_in_the_controllers_namespace() -> None:
    documents = objects()
    volume, claim = (
        one(documents, "PersistentVolume", "argusrl-system-argusrl-shared"),
        next(
            d.value
            for d in documents
            if d.kind == "PersistentVolumeClaim" and d.value["metadata"]["namespace"] != "default"
        ),
    )
    assert claim["metadata"]["namespace"] == "argusrl-system"
    assert volume["spec"]["claimRef"] == {"namespace": "argusrl-system", "name": "argusrl-shared"}
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"


def test_every_namespace_with_runs_gets_its_volume() -> None:
    """Users may create claims, and no volumes."""
    volumes = {
        d.value["spec"]["claimRef"]["namespace"]
        for d in objects(run_namespaces=["team-a", "team-b"])
        if d.kind == "PersistentVolume"
    }
    assert volumes == {"argusrl-system", "team-a", "team-b"}


def test_a_storage_class_makes_no_second_file_system_for_the_controller() -> None:
    config = kubernetes_config(volume="{claim: fresh, storage_class: fsx-sc}")
    with pytest.raises(ConfigError, match="second, empty file system") as caught:
        install(installation_of(config))
    assert "--namespace default" in caught.value.hint
    claims = [d for d in install(installation_of(config, namespace="default")) if d.kind == "PersistentVolumeClaim"]
    assert len(claims) == 1


def test_in_the_namespace_of_the_runs_nothing_is_doubled() -> None:
    documents = objects(namespace="default")
    assert not [d for d in documents if d.kind == "Namespace"]


def test_secrets_of_the_controller_are_references() -> None:
    container = one(objects(secrets={"HOOK": "hook/url"}), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "HOOK", "valueFrom": {"secretKeyRef": {"name": "hook", "key": "url"}}} in container["env"]


def test_images_are_pulled_where_workers_and_heads_go() -> None:
    documents = objects(prepull=True)
    for group, kind in (("workers", "ml.g7e.12xlarge"), ("heads", "ml.m5.4xlarge")):
        spec = one(documents, "DaemonSet", f"argusrl-prepull-{group}")["spec"]
        assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
        pod = spec["template"]["spec"]
        assert pod["nodeSelector"]["node.kubernetes.io/instance-type"] == kind
        assert "nvidia.com/gpu" not in str(pod["containers"][0]["resources"])
    assert not [d for d in objects() if d.kind == "DaemonSet"]


def test_where_heads_go_anywhere_only_workers_nodes_are_known() -> None:
    documents = install(installation_of(kubernetes_config(head="{cpus: 8, memory: 16Gi}"), prepull=True))
    assert [d.value["metadata"]["name"] for d in documents if d.kind == "DaemonSet"] == ["argusrl-prepull-workers"]
    assert "nodeSelector" not in one(documents, "Deployment")["spec"]["template"]["spec"]


def test_a_recipe_without_the_section() -> None:
    with pytest.raises(ConfigError, match=r"no section cluster\.kubernetes"):
        installation_of(load_config(ROOT / "recipes" / "quickstart.yaml").config)
