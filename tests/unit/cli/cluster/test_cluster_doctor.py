from __future__ import annotations

import json
import platform
import re
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from argusrl.cli.main import run
from argusrl.cluster.kinds import CLAIM, DEPLOYMENT, NODE, POD, RAY_JOB
from fakes.kubernetes_api import ApiServer, Rule
from fakes.kubernetes_recipe import RECIPE
from fakes.ray_cluster_objects import node, start

HEAD, WORKER = "maze-s1-cluster-head", "maze-s1-cluster-worker1"


def crd(plural: str, *versions: str, fields: tuple[str, ...] = ()) -> dict[str, Any]:
    schema = {"properties": {"spec": {"properties": {field: {} for field in fields}}}}
    served = [{"name": name, "served": True, "schema": {"openAPIV3Schema": schema}} for name in versions]
    return {"kind": "CustomResourceDefinition", "metadata": {"name": f"{plural}.ray.io"}, "spec": {"versions": served}}


def deployment(name: str, image: str, running: int = 1, **more: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": name} | {f"app.kubernetes.io/{key}": value for key, value in more.items()}
    spec = {"template": {"spec": {"containers": [{"name": name, "image": image}]}}}
    return {
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "kube-system", "labels": labels},
        "spec": spec,
        "status": {"availableReplicas": running},
    }


def lease(name: str, age_seconds: float = 0.0) -> dict[str, Any]:
    moment = datetime.fromtimestamp(time.time() - age_seconds, UTC).isoformat().replace("+00:00", "Z")
    return {"kind": "Lease", "metadata": {"name": name, "namespace": "kube-node-lease"}, "spec": {"renewTime": moment}}


@pytest.fixture
def fit(server: ApiServer) -> ApiServer:
    """A cluster in which everything is as it should be."""
    fields = ("preRunningDeadlineSeconds", "submitterConfig", "ttlSecondsAfterFinished")
    server.store.seed(crd("rayjobs", "v1", "v1alpha1", fields=fields))
    server.store.seed(crd("rayclusters", "v1"))
    server.store.seed(deployment("kuberay-operator", "quay.io/kuberay/operator:v1.7.1"))
    server.store.seed(deployment("argusrl", "argusrl:0.1.0", component="controller"))
    for name in ("a", "b", "c"):
        labels = {"node_health_status": "Schedulable", "instance_group_name": "workers"}
        server.store.seed(node(name, **labels))
        server.store.seed(lease(name))
    head = node("h", gpus=0, efa=0, instance_group_name="head")
    head["metadata"]["labels"]["node.kubernetes.io/instance-type"] = "ml.m5.4xlarge"
    server.store.seed(head)
    claim = {"accessModes": ["ReadWriteMany"], "volumeName": "fsx", "resources": {"requests": {"storage": "1Gi"}}}
    server.store.seed(
        {
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "argusrl-shared"},
            "spec": claim,
            "status": {"phase": "Bound"},
        }
    )
    server.store.seed(volume())
    return server


def volume(driver: str = "fsx.csi.aws.com", policy: str = "Retain") -> dict[str, Any]:
    spec = {"csi": {"driver": driver, "volumeHandle": "fs-1"}, "persistentVolumeReclaimPolicy": policy}
    return {"kind": "PersistentVolume", "metadata": {"name": "fsx"}, "spec": spec}


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and the findings by name."""
    capsys.readouterr()
    code = run(["cluster", "doctor", *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["fit"] is (code == 0)
    return code, {one["name"]: one for one in found["checks"]}


def test_a_cluster_that_is_fit(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, str(RECIPE))
    assert code == 0
    others = {name: one for name, one in found.items() if one["result"] != "ok"}
    assert set(others) == {"storage"}  # there is no pod to try it from
    assert others["storage"]["result"] == "skipped"
    assert "v1.7.1" in found["kuberay operator"]["detail"]
    assert found["nodes for workers"]["detail"].startswith("3 nodes")
    assert run(["cluster", "doctor", str(RECIPE)]) == 0
    assert "✓ rights" in capsys.readouterr().out


def test_an_empty_cluster(server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, str(RECIPE))
    assert code == 1
    assert {name for name, one in found.items() if one["result"] == "failed"} == {
        *("crd RayJob", "crd RayCluster", "kuberay operator", "nodes for head", "nodes for workers"),
    }
    assert "helm install" in found["crd RayJob"]["fix"]
    assert found["argusrl controller"]["result"] == "warning"
    assert found["node health"]["detail"] == "the cluster has no nodes"
    assert run(["cluster", "doctor"]) == 1
    assert "    → " in capsys.readouterr().out


def test_a_server_that_does_not_answer_ends_it(
    server: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argusrl.cluster.kube_http._READ_TRIES", 1)
    server.rules.append(Rule(status=503))
    code, found = doctor(capsys)
    assert code == 1
    assert set(found) == {"api server", "storage"}


@pytest.mark.parametrize(("status", "checks"), [(401, {"api server", "storage"}), (403, None)])
def test_a_cluster_of_which_nothing_may_be_seen_is_not_called_fit(
    status: int, checks: set[str] | None, fit: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fit.rules.append(Rule(status=status))
    code, found = doctor(capsys)
    assert code == 1
    assert found["api server"]["result"] == ("failed" if status == 401 else "skipped")
    assert checks is None or set(found) == checks


@pytest.mark.parametrize(
    ("image", "running", "result"),
    [
        ("operator:v1.7.0", 1, "ok"),
        ("operator:v1.6.2", 1, "warning"),
        ("operator:nightly", 1, "warning"),
        ("operator:v1.3.0", 1, "failed"),
        ("operator:v1.7.1", 0, "failed"),
    ],
)
def test_operators(image: str, running: int, result: str, fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    fit.store.seed(deployment("kuberay-operator", image, running))
    assert doctor(capsys)[1]["kuberay operator"]["result"] == result


@pytest.mark.parametrize(("value", "result"), [("true", "warning"), ("false", "ok")])
def test_an_operator_that_deletes_jobs_that_are_over(
    value: str, result: str, fit: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    operator = deployment("kuberay-operator", "operator:v1.7.0")
    variables = [{"name": "OTHER", "valueFrom": {}}, {"name": "DELETE_RAYJOB_CR_AFTER_JOB_FINISHES", "value": value}]
    operator["spec"]["template"]["spec"]["containers"][0]["env"] = variables
    fit.store.seed(operator)
    assert doctor(capsys)[1]["kuberay operator"]["result"] == result


def test_crds_that_are_too_old(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    fit.store.seed(crd("rayclusters", "v1alpha1"))
    fit.store.seed(crd("rayjobs", "v1", fields=("submitterConfig",)))
    found = doctor(capsys)[1]
    assert "serves v1alpha1, not v1" in found["crd RayCluster"]["detail"]
    assert "does not know preRunningDeadlineSeconds" in found["crd RayJob"]["detail"]


def test_a_user_with_rights_in_one_namespace_alone(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    for resource in ("nodes", "customresourcedefinitions", "persistentvolumes", "leases"):
        fit.rules.append(Rule(resource=resource, status=403))
    fit.rules.append(Rule(resource="deployments", namespace="", status=403))
    code, found = doctor(capsys)
    assert code == 0
    assert {name for name, one in found.items() if one["result"] == "skipped"} == {
        *("node clocks", "kuberay operator", "nodes", "volume", "storage"),
    }
    assert "you may not get nodes, list nodes" in found["rights"]["detail"]
    assert "you may not read the CRD itself" in found["crd RayJob"]["detail"]


def test_rights_that_are_missing(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    fit.rules.append(Rule(verb="delete", resource="rayjobs", status=403))
    code, found = doctor(capsys)
    assert code == 1
    assert found["rights: stop"]["detail"] == "you may not delete rayjobs in default"


def test_clocks(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    fit.clock_skew_seconds = 20.0
    fit.store.seed(lease("a", age_seconds=-60))
    fit.store.seed(lease("b", age_seconds=100))
    found = doctor(capsys)[1]
    assert found["clock"]["result"] == "warning"
    assert found["node clocks"]["detail"] == "ahead of the API server: a"
    assert found["node heartbeats"]["detail"].endswith("of b")
    fit.clock_skew_seconds = -3600.0
    code, found = doctor(capsys)
    assert code == 1
    assert "behind this machine" in found["clock"]["detail"]


def test_nodes_that_are_ill_or_too_few(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    fit.store.seed(node("a", node_health_status="UnschedulablePendingReboot", instance_group_name="workers"))
    fit.store.seed(node("b", gpus=1, instance_group_name="workers"))
    code, found = doctor(capsys, str(RECIPE))
    assert code == 0
    assert "a: UnschedulablePendingReboot" in found["node health"]["detail"]
    assert found["nodes for workers"]["detail"].startswith("1 of the 3 nodes needed are healthy")
    fit.store.delete(NODE, "c")
    code, found = doctor(capsys, str(RECIPE))
    assert code == 1
    assert found["nodes for workers"]["detail"].startswith("2 of the 3 nodes needed have")


@pytest.mark.parametrize(
    ("driver", "policy", "result", "words"),
    [
        ("s3.csi.aws.com", "Retain", "failed", "no rename and no links"),
        ("fsx.csi.aws.com", "Delete", "warning", "whoever deletes the claim deletes every run"),
        ("efs.csi.aws.com", "Retain", "ok", "efs.csi.aws.com"),
    ],
)
def test_volumes(
    driver: str, policy: str, result: str, words: str, fit: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fit.store.seed(volume(driver, policy))
    found = doctor(capsys)[1]["volume"]
    assert found["result"] == result
    assert words in found["detail"]


def test_claims(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    fit.store.patch(CLAIM, "argusrl-shared", {"status": {"phase": "Pending"}}, "default", sub="status")
    assert doctor(capsys)[1]["claim"]["detail"] == "argusrl-shared is Pending"
    fit.store.delete(CLAIM, "argusrl-shared", "default")
    found = doctor(capsys, str(RECIPE))[1]
    assert "submit creates it" in found["claim"]["detail"]
    assert found["volume"]["detail"] == "default-argusrl-shared is not there yet: submit creates it"
    given = [f"cluster.kubernetes.volume.{key}=null" for key in ("file_system_id", "dns_name", "mount_name")]
    code, found = doctor(capsys, str(RECIPE), *given)
    assert code == 1
    assert "has no PersistentVolumeClaim argusrl-shared" in found["claim"]["detail"]


def test_a_volume_that_the_user_may_not_create(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Rights in one namespace do not reach PersistentVolumes: submit would be refused."""
    fit.store.delete(CLAIM, "argusrl-shared", "default")
    fit.rules.append(Rule(verb="create", resource="persistentvolumes", status=403))
    code, found = doctor(capsys, str(RECIPE))
    assert code == 1
    assert found["volume"]["detail"] == "there is no PersistentVolume default-argusrl-shared, and you may not create it"
    assert "install RECIPE --run-namespace default --apply" in found["volume"]["fix"]
    fit.store.seed({**volume(), "metadata": {"name": "default-argusrl-shared"}})
    code, found = doctor(capsys, str(RECIPE))
    assert (code, found["volume"]["result"]) == (0, "ok")
    fit.rules.append(Rule(resource="persistentvolumes", status=403))
    assert doctor(capsys, str(RECIPE))[1]["volume"]["result"] == "warning"


def test_nodes_of_a_type_that_is_in_no_table(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "c"):
        labels = {"node.kubernetes.io/instance-type": "ml.g9.huge"}
        fit.store.patch(NODE, name, {"metadata": {"labels": labels}})
    workers = "cluster.kubernetes.workers={instance: ml.g9.huge, nodes: 3, cpus: 8, memory: 64Gi"
    found = doctor(capsys, str(RECIPE), workers + ", gpus: 2}")[1]
    assert found["nodes for workers"]["result"] == "ok"
    code, found = doctor(capsys, str(RECIPE), workers + "}")
    assert code == 1
    assert "'ml.g9.huge' is not known" in found["nodes for workers"]["detail"]


def test_a_queue_that_is_not_there(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    fit.store.seed({"kind": "LocalQueue", "metadata": {"name": "team-queue"}, "spec": {}})
    code, found = doctor(capsys, str(RECIPE), "cluster.kubernetes.queue.name=team")
    assert code == 1
    assert found["queue"]["fix"] == "queues there: team-queue"
    code, _ = doctor(capsys, str(RECIPE), "cluster.kubernetes.queue.name=team-queue")
    assert code == 0


def seen(**more: Any) -> str:
    values = {
        "root": "/fsx/argusrl/runs",
        "file_system": "lustre",
        "python": "3.11.9",
        "ray": "2.60.0",
        "argusrl": "0.1.0",
    }
    fast = {"write_bytes_per_second": 4e8, "fsync_seconds": 0.002, "free_bytes": 10**12, "time": time.time()}
    return json.dumps({**values, **fast, **more})


def test_the_guide_shows_what_the_doctor_says(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines in docs/hyperpod.md are those of this cluster, in this order."""
    assert run(["cluster", "submit", str(RECIPE), "run.name=maze"]) == 0
    start(fit.store, fit.store.objects(RAY_JOB)[0], ["h", "a"])
    fit.programs[HEAD] = fit.programs[WORKER] = lambda _: (0, seen(python=platform.python_version()))
    capsys.readouterr()
    assert run(["cluster", "doctor", str(RECIPE), "run.name=maze"]) == 0
    said = capsys.readouterr().out.splitlines()
    guide = (RECIPE.parents[1] / "docs" / "hyperpod.md").read_text()
    shown = [line.strip() for line in guide.splitlines() if line.startswith("    ✓ ")]
    assert [re.sub(r"Python [0-9.]+", "Python 3.11.14", line) for line in said] == shown


def test_pods_of_a_run_try_the_storage(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "submit", str(RECIPE), "run.name=maze"]) == 0
    start(fit.store, fit.store.objects(RAY_JOB)[0], ["h", "a"])
    asked = []

    def program(command: list[str]) -> tuple[int, str]:
        asked.append(command)
        return 0, f"a warning\n{seen()}"

    fit.programs[HEAD] = program
    fit.programs[WORKER] = lambda _: (0, seen(write_bytes_per_second=1e6, time=time.time() + 90, python="3.12.1"))
    code, found = doctor(capsys, str(RECIPE), "run.name=maze")
    assert code == 0
    assert asked == [["python", "-m", "argusrl.cluster.root_probe", "/fsx/argusrl/runs"]]
    assert "400 MB/s" in found["storage from head"]["detail"]
    assert found["storage from worker"]["result"] == "warning"
    assert found["clock of worker"]["result"] == "warning"
    assert "3.12.1 in the image" in found["python of worker"]["detail"]
    assert "Ray 2.60.0" in found["versions of head"]["detail"]
    fit.programs[HEAD] = lambda _: (0, seen(error="/fsx cannot hold runs: a hard link failed", hint="use FSx"))
    fit.programs[WORKER] = lambda _: (1, "python: not found")
    code, found = doctor(capsys, "--run", "maze")
    assert code == 1
    assert found["storage from head"]["fix"] == "use FSx"
    assert "python: not found" in found["storage from worker"]["detail"]


def test_pods_made_for_it_try_the_storage(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    made = []

    def kubelet() -> None:
        for pod in list(fit.store.objects(POD)):
            meta = pod["metadata"]
            if pod["status"]["phase"] == "Pending" and "-probe-" in meta["name"]:
                made.append(pod)
                fit.logs[meta["name"], ""] = seen() + "\n"
                fit.store.seed({**pod, "status": {"phase": "Succeeded"}})

    fit.store.listeners.append(kubelet)
    code, found = doctor(capsys, str(RECIPE), "run.name=maze", "--probe")
    assert code == 0
    assert {found[f"storage from {role}"]["result"] for role in ("head", "worker")} == {"ok"}
    assert fit.store.objects(POD) == []
    head, worker = made
    assert worker["spec"]["nodeSelector"]["node.kubernetes.io/instance-type"] == "ml.g7e.12xlarge"
    assert head["spec"]["nodeSelector"] != worker["spec"]["nodeSelector"]
    assert "nvidia.com/gpu" not in json.dumps(worker["spec"]["containers"])


def test_a_pod_that_cannot_try_it_says_why(
    fit: ApiServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argusrl.cluster.doctor.probing._POD_SECONDS", 0.1)
    code, found = doctor(capsys, str(RECIPE), "--probe")
    assert code == 1
    assert "not seen by the scheduler yet" in found["storage from head"]["detail"]
    assert fit.store.objects(POD) == []
    assert fit.store.objects(DEPLOYMENT)


def test_a_namespace_and_a_run_that_are_not_there(fit: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, "--namespace", "other", "--run", "nope")
    assert code == 1
    assert found["namespace"]["detail"] == "there is no namespace other"
    assert found["storage"]["detail"] == "no run nope in other"
