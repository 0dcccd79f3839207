from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from argusrl.cluster.instances import INSTANCES
from argusrl.cluster.manifests.check import problems_of
from argusrl.cluster.manifests.document import to_yaml
from argusrl.cluster.manifests.job import RAY_VERSION, renumbered
from argusrl.cluster.manifests.render import render
from argusrl.cluster.manifests.sizes import quantity_bytes
from argusrl.config.load import load_config
from argusrl.errors import ConfigError
from fakes.kubernetes_recipe import ROOT, head_and_worker, kubernetes_config, ray_job, rendered

VARIANTS: dict[str, tuple[list[str], dict[str, object]]] = {
    "reference": ([], {}),
    "existing claim": ([], {"volume": "{claim: team-fsx}"}),
    "dynamic claim": ([], {"volume": "{claim: fresh, storage_class: fsx-sc}"}),
    "queued": ([], {"queue": "{name: hyperpod-ns-team-localqueue, priority: training-priority}"}),
    "studio": ([], {"studio": "public"}),
    "plain KubeRay": ([], {"workers__instance": "p5en.48xlarge", "workers__instance_group": "null", "head": "{}"}),
    "role and secrets": (
        [],
        {"role_arn": "arn:aws:iam::123456789012:role/run", "secrets": "{HF_TOKEN: hub/token}"},
    ),
    "CPU": (
        ["cluster.device=cpu", "cluster.slots=2"],
        {"workers": "{cpus: 16, memory: 32Gi, gpus: 0}", "nvme": "null"},
    ),
}


def variant(name: str) -> list[str]:
    overrides, section = VARIANTS[name]
    slots = [] if name in ("CPU", "reference") else ["cluster.slots=null"]
    return [
        *slots,
        *overrides,
        *(f"cluster.kubernetes.{key.replace('__', '.')}={value}" for key, value in section.items()),
    ]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_rendering_is_valid(name: str) -> None:
    for document in render(kubernetes_config(*variant(name))):
        assert problems_of(document.value) == []


@pytest.mark.parametrize("name", VARIANTS)
def test_yaml_is_the_objects_and_always_the_same(name: str) -> None:
    documents = render(kubernetes_config(*variant(name)))
    text = to_yaml(documents)
    assert list(yaml.safe_load_all(text)) == [document.value for document in documents]
    assert to_yaml(render(kubernetes_config(*variant(name)))) == text
    assert "&id" not in text
    assert all(len(line) <= 112 for line in text.splitlines() if line.startswith("#"))


def test_only_the_controller_submits_again() -> None:
    spec = ray_job()["spec"]
    assert spec["backoffLimit"] == 0
    assert spec["submitterConfig"] == {"backoffLimit": 0}
    assert spec["shutdownAfterJobFinishes"]
    assert "suspend" not in spec
    assert spec["entrypoint"] == "argusrl train /etc/argusrl/recipe.yaml"


def test_a_job_waits_for_nodes_longer_than_the_controller_does() -> None:
    spec = ray_job("cluster.budget.capacity_wait_seconds=100")["spec"]
    assert spec["preRunningDeadlineSeconds"] == 100 + 1800


def test_names_and_labels_follow_from_the_run() -> None:
    objects = rendered(kubernetes_config("run.name=Maze_2"), submission=3)
    job = objects["RayJob"]
    assert re.fullmatch(r"maze-2-[0-9a-f]{6}-s3", job["metadata"]["name"])
    assert job["spec"]["jobId"] == job["metadata"]["name"]
    assert job["metadata"]["labels"]["argusrl.io/submission"] == "3"
    assert job["metadata"]["annotations"]["argusrl.io/run-folder"] == "/fsx/argusrl/runs/Maze_2"
    run = job["metadata"]["labels"]["argusrl.io/run"]
    for value in objects.values():
        assert value["metadata"]["labels"]["argusrl.io/run"] == run
        assert value["metadata"]["labels"]["app.kubernetes.io/name"] == "argusrl"


def test_the_volume_is_kept_and_owned_by_nobody() -> None:
    objects = rendered(kubernetes_config())
    volume, claim = objects["PersistentVolume"]["spec"], objects["PersistentVolumeClaim"]
    assert volume["persistentVolumeReclaimPolicy"] == "Retain"
    assert volume["mountOptions"] == ["flock"]
    assert volume["csi"]["volumeHandle"] == "fs-0123456789abcdef0"
    assert claim["spec"]["volumeName"] == objects["PersistentVolume"]["metadata"]["name"]
    assert claim["spec"]["storageClassName"] == ""
    assert all("ownerReferences" not in value["metadata"] for value in objects.values())


def test_an_existing_claim_is_only_mounted() -> None:
    objects = rendered(kubernetes_config(volume="{claim: team-fsx}"))
    assert not {"PersistentVolume", "PersistentVolumeClaim"} & set(objects)
    pod = objects["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "team-fsx"}


def test_a_storage_class_makes_a_claim_alone() -> None:
    objects = rendered(kubernetes_config(volume="{claim: fresh, storage_class: fsx-sc, capacity: 2400Gi}"))
    assert "PersistentVolume" not in objects
    assert objects["PersistentVolumeClaim"]["spec"]["storageClassName"] == "fsx-sc"
    assert objects["PersistentVolumeClaim"]["spec"]["resources"]["requests"]["storage"] == "2400Gi"


def test_the_runs_account_has_no_rights_and_no_token() -> None:
    objects = rendered(kubernetes_config(role_arn="arn:aws:iam::123456789012:role/run"))
    account = objects["ServiceAccount"]
    assert account["automountServiceAccountToken"] is False
    assert account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].endswith(":role/run")
    assert not {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"} & set(objects)


def test_ray_is_reached_by_its_own_pods_the_operator_and_the_controller() -> None:
    policy = rendered(kubernetes_config())["NetworkPolicy"]["spec"]
    own, dashboard, metrics = policy["ingress"]
    assert own == {"from": [{"podSelector": policy["podSelector"]}]}
    names = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"] for peer in dashboard["from"]]
    assert names == ["kuberay-operator", "argusrl"]
    assert dashboard["from"][1]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "argusrl-system"}
    assert dashboard["from"][0]["namespaceSelector"] == {}
    named = rendered(kubernetes_config(operator_namespace="kuberay"))["NetworkPolicy"]["spec"]["ingress"][1]["from"][0]
    assert named["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "kuberay"}
    assert dashboard["ports"] == [{"protocol": "TCP", "port": 8265}]
    assert metrics["ports"] == [{"protocol": "TCP", "port": 8080}]


def test_ports_out_are_those_that_the_recipe_needs() -> None:
    config = kubernetes_config(
        'rewards.0={kind: http, url: "http://judge.example:9000/score"}',
        "observe.mlflow={uri: https://mlflow.example/x}",
        egress_ports="[5000]",
    )
    (rule,) = [
        rule
        for rule in rendered(config)["NetworkPolicy"]["spec"]["egress"]
        if {"ipBlock": {"cidr": "0.0.0.0/0"}} in rule.get("to", [])
    ]
    assert [port["port"] for port in rule["ports"]] == [443, 5000, 8889, 9000]


def test_studio_shows_the_dashboard_when_asked() -> None:
    objects = rendered(kubernetes_config(studio="private"))
    annotations = objects["RayJob"]["metadata"]["annotations"]
    assert annotations["access.sagemaker.amazonaws.com/enabled"] == "true"
    assert annotations["access.sagemaker.amazonaws.com/access-strategy"] == "ray-access-strategy-private"
    text = str(objects["NetworkPolicy"])
    assert "hyperpod-ray" in text
    assert "hyperpod-ray" not in str(rendered(kubernetes_config())["NetworkPolicy"])


def test_a_queue_gets_its_labels() -> None:
    labels = ray_job(queue="{name: team-queue, priority: training-priority}")["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team-queue"
    assert labels["kueue.x-k8s.io/priority-class"] == "training-priority"


def test_the_ray_of_the_image_is_the_pinned_one() -> None:
    assert f"ray=={RAY_VERSION}\n" in (ROOT / "requirements" / "cpu.txt").read_text()


def test_a_later_submission_is_the_same_job_under_another_number() -> None:
    first, third = (rendered(kubernetes_config(), number)["RayJob"] for number in (1, 3))
    running = {**first, "status": {"jobStatus": "FAILED"}, "spec": {**first["spec"], "suspend": True}}
    running["metadata"] = {**first["metadata"], "uid": "x", "resourceVersion": "7", "ownerReferences": []}
    assert renumbered(running, "qwen3vl_8b_hyperpod", 3) == third
    assert running["metadata"]["labels"]["argusrl.io/submission"] == "1"


def test_a_recipe_without_the_section_says_so() -> None:
    config = load_config(ROOT / "recipes" / "quickstart.yaml").config
    with pytest.raises(ConfigError, match=r"no section cluster\.kubernetes"):
        render(config)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.slots=16"], "3 nodes of 2 GPUs are 6 slots"),
        (["cluster.kubernetes.workers.instance=ml.g7e.12xlrage"], "did you mean ml.g7e.12xlarge"),
        (["cluster.kubernetes.head.memory=100Gi"], "may ask for 59Gi"),
        (["cluster.kubernetes.workers.gpus=4", "cluster.slots=12"], r"workers\.gpus 4: ml\.g7e\.12xlarge has 2"),
        (["cluster.kubernetes.workers.instance=null"], "name an instance type, or give cpus, memory and gpus"),
        (["cluster.cpus_per_slot=40"], "6 slots take 240 CPUs, and 3 pods have 132"),
        (["engine.tensor_parallel=4"], "a node has 2 GPUs"),
        (["cluster.kubernetes.workers.instance=ml.m5.4xlarge", "cluster.slots=null"], "have no GPU"),
    ],
)
def test_what_cannot_run_is_refused_with_the_numbers(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        render(kubernetes_config(*overrides))


HEAD, WORKERS = "cluster.kubernetes.head", "cluster.kubernetes.workers"


def test_a_type_that_is_in_no_table_chooses_nodes_where_the_recipe_says_how_large_pods_are() -> None:
    head = f"{HEAD}={{instance: ml.m9.large, cpus: 4, memory: 12Gi}}"
    workers = f"{WORKERS}={{instance: ml.g9.huge, nodes: 3, cpus: 40, memory: 400Gi, gpus: 2, efa: 1}}"
    for template, kind in zip(head_and_worker(ray_job(head, workers)), ("ml.m9.large", "ml.g9.huge"), strict=True):
        assert template["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"] == kind


@pytest.mark.parametrize(
    ("change", "amounts"),
    [
        (f"{HEAD}={{instance: ml.m9.large, cpus: 4}}", "head: cpus and memory"),
        (f"{WORKERS}={{instance: ml.g9.huge, nodes: 3, cpus: 4}}", "workers: cpus, memory and gpus"),
    ],
)
def test_a_type_that_is_in_no_table_needs_amounts(change: str, amounts: str) -> None:
    with pytest.raises(ConfigError, match=rf"is not known .*of another type give cluster\.kubernetes\.{amounts}"):
        render(kubernetes_config(change))


def test_the_ray_job_is_created_last() -> None:
    kinds = [document.kind for document in render(kubernetes_config())]
    assert kinds == [
        "ServiceAccount",
        "NetworkPolicy",
        "ConfigMap",
        "PersistentVolume",
        "PersistentVolumeClaim",
        "RayJob",
    ]


def test_no_secret_is_in_any_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "hunter2hunter2")
    config = kubernetes_config(
        'rewards.0={kind: http, url: "http://judge.example/score", token: "env:JUDGE_TOKEN"}',
        secrets="{JUDGE_TOKEN: judge/token}",
    )
    assert "hunter2" not in to_yaml(render(config))


@pytest.mark.parametrize("name", [name for name, kind in INSTANCES.items() if kind.gpus])
def test_every_instance_with_gpus_can_be_rendered(name: str) -> None:
    job = ray_job("cluster.slots=null", "cluster.cpus_per_slot=4", workers__instance=f"ml.{name}")
    worker = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
    kind = INSTANCES[name]
    assert limits["nvidia.com/gpu"] == str(kind.gpus)
    assert quantity_bytes(limits["memory"]) < 0.94 * kind.memory_bytes
    (shm,) = [one for one in worker["template"]["spec"]["volumes"] if one["name"] == "shm"]
    store = int(worker["rayStartParams"]["object-store-memory"])
    assert store < quantity_bytes(shm["emptyDir"]["sizeLimit"]) <= kind.memory_bytes / 2
    assert problems_of(job) == []
