from __future__ import annotations

import pytest

from argusrl.cluster.manifests.pods import GRACE_SECONDS
from argusrl.journal.drains import DRAIN_SECONDS
from fakes.kubernetes_recipe import head_and_worker, ray_job, variables

HEALTH = "sagemaker.amazonaws.com/node-health-status"


def test_workers_take_whole_nodes_and_the_head_stays_small() -> None:
    job = ray_job()
    head, worker = (template["spec"]["containers"][0] for template in head_and_worker(job))
    assert head["resources"]["limits"] == {"cpu": "8", "memory": "16Gi"}
    assert worker["resources"]["limits"] == {
        "cpu": "44",
        "memory": "476Gi",
        "nvidia.com/gpu": "2",
        "vpc.amazonaws.com/efa": "1",
    }
    assert head["resources"]["requests"] == head["resources"]["limits"]
    group = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 3, 3)
    start = job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]
    assert (start["num-cpus"], start["num-gpus"], start["dashboard-host"]) == ("0", "0", "0.0.0.0")
    assert int(start["object-store-memory"]) <= 1 << 30


def test_one_node_needs_no_efa_and_the_recipe_may_say_how_many() -> None:
    alone = ray_job("cluster.slots=2", workers__nodes=1)
    assert "vpc.amazonaws.com/efa" not in head_and_worker(alone)[1]["spec"]["containers"][0]["resources"]["limits"]
    assert "FI_PROVIDER" not in variables(head_and_worker(alone)[1])
    fewer = ray_job("cluster.slots=null", workers__instance="ml.g7e.48xlarge", workers__efa=2, workers__gpus=4)
    limits = head_and_worker(fewer)[1]["spec"]["containers"][0]["resources"]["limits"]
    assert (limits["vpc.amazonaws.com/efa"], limits["nvidia.com/gpu"]) == ("2", "4")


@pytest.mark.parametrize(
    ("instance", "rdma", "protocol"),
    [
        ("ml.p5en.48xlarge", "1", None),
        ("ml.p4d.24xlarge", "1", None),
        ("ml.g5.12xlarge", "0", "simple"),
        ("ml.g6e.48xlarge", "0", "simple"),
        ("ml.g7e.12xlarge", None, None),  # libfabric finds out by itself
    ],
)
def test_nccl_is_told_what_the_instance_has(instance: str, rdma: str | None, protocol: str | None) -> None:
    found = variables(head_and_worker(ray_job("cluster.slots=null", workers__instance=instance))[1])
    assert found["FI_PROVIDER"] == "efa"
    assert found["NCCL_SOCKET_IFNAME"] == "^docker,lo,veth"
    assert (found.get("FI_EFA_USE_DEVICE_RDMA"), found.get("NCCL_PROTO")) == (rdma, protocol)


def test_gpu_workers_go_to_healthy_nodes_only_and_never_tolerate_sick_ones() -> None:
    head, worker = head_and_worker(ray_job())
    required = worker["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"] == [
        {"matchExpressions": [{"key": HEALTH, "operator": "In", "values": ["Schedulable"]}]}
    ]
    assert "affinity" not in head["spec"]  # HyperPod watches no CPU node
    assert head["spec"]["nodeSelector"]["sagemaker.amazonaws.com/instance-group-name"] == "head"
    for template in (head, worker):
        keys = {toleration["key"] for toleration in template["spec"]["tolerations"]}
        assert HEALTH not in keys
        assert all(t["tolerationSeconds"] == 30 for t in template["spec"]["tolerations"] if t["effect"] == "NoExecute")
    assert "nvidia.com/gpu" in {toleration["key"] for toleration in worker["spec"]["tolerations"]}


def test_other_clusters_have_no_health_labels() -> None:
    job = ray_job(workers__instance="g7e.12xlarge", workers__instance_group="null")
    assert "nodeAffinity" not in head_and_worker(job)[1]["spec"]["affinity"]


def test_a_head_that_is_put_nowhere_stays_off_the_workers_nodes() -> None:
    head, _ = head_and_worker(ray_job(head="{}"))
    (term,) = head["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["preference"]["matchExpressions"] == [
        {"key": "node.kubernetes.io/instance-type", "operator": "NotIn", "values": ["ml.g7e.12xlarge"]}
    ]
    assert head["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "8", "memory": "16Gi"}


def test_one_worker_of_the_run_on_a_host() -> None:
    labels = head_and_worker(ray_job())[1]["metadata"]["labels"]
    affinity = head_and_worker(ray_job())[1]["spec"]["affinity"]
    (term,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()


def test_pods_end_after_the_drain_and_are_never_restarted_in_place() -> None:
    for template in head_and_worker(ray_job()):
        spec = template["spec"]
        assert spec["restartPolicy"] == "Never"
        assert spec["terminationGracePeriodSeconds"] == GRACE_SECONDS > DRAIN_SECONDS
        hook = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert hook == ["argusrl", "drain", "--wait"]


def test_pods_know_who_and_where_they_are() -> None:
    for template in head_and_worker(ray_job()):
        found = variables(template)
        fields = {name: value["fieldRef"]["fieldPath"] for name, value in found.items() if "fieldRef" in value}
        assert fields == {
            "POD_NAME": "metadata.name",
            "POD_IP": "status.podIP",
            "POD_NAMESPACE": "metadata.namespace",
            "NODE_NAME": "spec.nodeName",
            "HOST_IP": "status.hostIP",
            "HYPERPOD_JMA_HOST": "status.hostIP",
            "ARGUSRL_SUBMISSION": "metadata.labels['argusrl.io/submission']",
        }
        assert found["ARGUSRL_RUN_FOLDER"] == "/fsx/argusrl/runs/qwen3vl_8b_hyperpod"


def test_secrets_are_references() -> None:
    job = ray_job(secrets="{HF_TOKEN: hub-access/token}")
    for template in head_and_worker(job):
        assert variables(template)["HF_TOKEN"] == {"secretKeyRef": {"name": "hub-access", "key": "token"}}


def test_pods_run_as_the_owner_of_the_volume_without_rights() -> None:
    for template in head_and_worker(ray_job(volume__uid=1234, volume__gid=4321)):
        spec = template["spec"]
        context = spec["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (1234, 4321, 4321)
        assert context["runAsNonRoot"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["containers"][0]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def test_weights_are_staged_and_shown_at_the_recipes_path() -> None:
    _, worker = head_and_worker(ray_job())
    own, stage = worker["spec"]["initContainers"]
    mounts = {mount["mountPath"]: mount for mount in worker["spec"]["containers"][0]["volumeMounts"]}
    shown = mounts["/fsx/models/Qwen3-VL-8B-Instruct"]
    assert shown["readOnly"]
    command = stage["command"]
    assert command[:3] == ["python", "-m", "argusrl.cluster.node_disk"]
    assert command[command.index("--copy") + 1] == f"/nvme/{shown['subPath']}"
    assert command[command.index("--weights") + 1] == shown["mountPath"]
    assert variables(worker)["RAY_object_spilling_directory"].startswith(command[command.index("--spill") + 1])
    assert own["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    (disk,) = [volume for volume in worker["spec"]["volumes"] if volume["name"] == "nvme"]
    assert disk["hostPath"]["path"].startswith("/opt/dlami/nvme/")


def test_without_nvme_nothing_of_the_host_is_mounted() -> None:
    template = head_and_worker(ray_job(nvme="null"))[1]
    assert "initContainers" not in template["spec"]
    assert not [volume for volume in template["spec"]["volumes"] if "hostPath" in volume]
    assert "RAY_object_spilling_directory" not in variables(template)


def test_a_model_of_the_hub_is_downloaded_once_for_all() -> None:
    template = head_and_worker(ray_job("model.path=Qwen/Qwen3-VL-8B-Instruct"))[1]
    assert variables(template)["HF_HOME"] == "/fsx/argusrl/huggingface"
    assert len(template["spec"]["initContainers"][1]["command"]) == 5  # spilled objects only


def test_workers_without_gpus_ask_for_none() -> None:
    job = ray_job(
        "cluster.device=cpu", "cluster.slots=3", workers="{cpus: 8, memory: 32Gi, gpus: 0, nodes: 3}", nvme="null"
    )
    template = head_and_worker(job)[1]
    assert template["spec"]["containers"][0]["resources"]["limits"] == {"cpu": "8", "memory": "32Gi"}
    assert "NCCL_SOCKET_IFNAME" not in variables(template)


def test_labels_and_pull_secrets_of_the_recipe() -> None:
    job = ray_job(workers__labels="{team: vision}", image_pull_secrets="[registry]", head__selector="{zone: a}")
    head, worker = head_and_worker(job)
    assert worker["metadata"]["labels"]["team"] == "vision"
    assert head["spec"]["imagePullSecrets"] == worker["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert head["spec"]["nodeSelector"]["zone"] == "a"
