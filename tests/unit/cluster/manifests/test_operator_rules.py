"""Each rule by an object that breaks it alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from argusrl.cluster.manifests.check import problems_of, read_documents
from argusrl.errors import ConfigError
from fakes.kubernetes_recipe import ROOT, ray_job

Change = Callable[[dict[str, Any]], None]

SAMPLE = ROOT.parent / "shared" / "cluster" / "sample_bad_rayjob.yaml"


def spec(**values: Any) -> Change:
    return lambda job: job["spec"].update(values)


def without(*keys: str) -> Change:
    return lambda job: [job["spec"].pop(key) for key in keys] and None


def cluster(**values: Any) -> Change:
    return lambda job: job["spec"]["rayClusterSpec"].update(values)


def head(**values: Any) -> Change:
    return lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"].update(values)


def start(**values: str) -> Change:
    return lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update(
        {key.replace("_", "-"): value for key, value in values.items()}
    )


def variable(name: str, value: str = "x") -> Change:
    def change(job: dict[str, Any]) -> None:
        container = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        container["env"].append({"name": name, "value": value})

    return change


def pod(**values: Any) -> Change:
    return lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"].update(values)


def worker(**values: Any) -> Change:
    return lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].update(values)


def metadata(**values: Any) -> Change:
    return lambda job: job["metadata"].update(values)


def annotation(**values: str) -> Change:
    return lambda job: job["metadata"]["annotations"].update(values)


def rule(policy: str, seconds: int = 0, **condition: str) -> dict[str, Any]:
    return {"policy": policy, "condition": {**condition, "ttlSeconds": seconds}}


SELECTOR = {"ray.io/cluster": "shared"}
SUCCEEDED = {"jobStatus": "SUCCEEDED"}
REDIS = {"redisAddress": "redis:6379"}
V2 = {"enableInTreeAutoscaling": True, "autoscalerOptions": {"version": "v2"}}
QUEUED = {"labels": {"kueue.x-k8s.io/queue-name": "team"}}

RULES: list[tuple[str, list[Change], str]] = [
    ("long name", [metadata(name="a" * 48)], "has 48 characters; KubeRay takes 47"),
    ("odd name", [metadata(name="1-maze")], "beginning with a letter"),
    ("mode", [spec(submissionMode="HttpMode")], "did you mean HTTPMode"),
    ("interactive retry", [spec(submissionMode="InteractiveMode", backoffLimit=1)], "InteractiveMode does not retry"),
    ("sidecar submitter", [spec(submissionMode="SidecarMode")], "submitterConfig: SidecarMode has no submitter"),
    (
        "sidecar restart",
        [spec(submissionMode="SidecarMode"), without("submitterConfig"), pod(restartPolicy="Always")],
        "must be Never in SidecarMode",
    ),
    ("deadline", [spec(activeDeadlineSeconds=0)], "activeDeadlineSeconds: must be above 0"),
    ("backoff", [spec(backoffLimit=-1)], "backoffLimit: must not be below 0"),
    ("ttl", [spec(ttlSecondsAfterFinished=-1)], "ttlSecondsAfterFinished: must not be below 0"),
    ("ttl without shutdown", [spec(shutdownAfterJobFinishes=False)], "only with shutdownAfterJobFinishes"),
    ("runtime env", [spec(runtimeEnvYAML="a: [")], "runtimeEnvYAML: not YAML"),
    ("runtime env kind", [spec(runtimeEnvYAML="- a")], "runtimeEnvYAML: must be a mapping"),
    (
        "suspend",
        [spec(suspend=True, shutdownAfterJobFinishes=False, ttlSecondsAfterFinished=0)],
        "suspend: only with shutdownAfterJobFinishes",
    ),
    ("no cluster", [without("rayClusterSpec")], "needs rayClusterSpec, or a clusterSelector"),
    ("selector", [spec(clusterSelector={"app": "x"})], "must name a cluster under ray.io/cluster"),
    ("selector retry", [spec(clusterSelector=SELECTOR, backoffLimit=2)], "a retry makes a new cluster"),
    ("selector suspend", [spec(clusterSelector=SELECTOR, suspend=True)], "suspend: not with clusterSelector"),
    (
        "selector sidecar",
        [spec(clusterSelector=SELECTOR, submissionMode="SidecarMode"), without("submitterConfig")],
        "SidecarMode does not work with clusterSelector",
    ),
    ("empty strategy", [spec(deletionStrategy={})], "needs deletionRules, or both"),
    (
        "half a strategy",
        [spec(deletionStrategy={"onSuccess": {"policy": "DeleteSelf"}})],
        "needs deletionRules, or both onSuccess and onFailure",
    ),
    (
        "rules and shutdown",
        [spec(deletionStrategy={"deletionRules": [rule("DeleteSelf", **SUCCEEDED)]})],
        "not with shutdownAfterJobFinishes",
    ),
    (
        "no policy",
        [spec(deletionStrategy={"onSuccess": {}, "onFailure": {"policy": "DeleteSelf"}})],
        r"onSuccess\.policy: missing",
    ),
    (
        "delete none",
        [spec(deletionStrategy={"onSuccess": {"policy": "DeleteNone"}, "onFailure": {"policy": "DeleteSelf"}})],
        "contradicts shutdownAfterJobFinishes",
    ),
    ("manager", [spec(managedBy="me")], "managedBy: me is none of"),
    ("cluster manager", [cluster(managedBy="me")], r"rayClusterSpec\.managedBy: me is none of"),
    ("no container", [pod(containers=[])], "needs a container"),
    ("two amounts", [head(resources={"CPU": "8"})], "both in rayStartParams and in resources"),
    ("labels", [start(labels="a=b")], r"rayStartParams\.labels: not supported; use headGroupSpec\.labels"),
    ("label key", [head(labels={"bad key": "x"})], "bad key is no name of a label"),
    ("label value", [head(labels={"zone": "not ok"})], "not ok is no value of a label"),
    ("replicas", [worker(minReplicas=4)], "minReplicas 4 is above maxReplicas 3"),
    (
        "suspended group",
        [worker(suspend=True), cluster(enableInTreeAutoscaling=True)],
        "suspend: not with enableInTreeAutoscaling",
    ),
    (
        "two ways to fault tolerance",
        [cluster(gcsFaultToleranceOptions=REDIS), annotation(**{"ray.io/ft-enabled": "true"})],
        "ft-enabled and gcsFaultToleranceOptions",
    ),
    (
        "namespace twice",
        [
            cluster(gcsFaultToleranceOptions=REDIS),
            annotation(**{"ray.io/external-storage-namespace": "x"}),
        ],
        "externalStorageNamespace",
    ),
    ("rocksdb", [cluster(gcsFaultToleranceOptions={"backend": "rocksdb"})], "rocksdb is alpha"),
    (
        "redis password",
        [cluster(gcsFaultToleranceOptions=REDIS), start(redis_password="x")],
        r"write gcsFaultToleranceOptions\.redisPassword",
    ),
    (
        "redis variables",
        [cluster(gcsFaultToleranceOptions=REDIS), variable("REDIS_PASSWORD")],
        "the variable REDIS_PASSWORD",
    ),
    ("redis by the way", [variable("RAY_REDIS_ADDRESS")], "turns on fault tolerance of the GCS"),
    ("redis user", [start(redis_username="x")], r"gcsFaultToleranceOptions\.redisUsername"),
    ("autoscaler v2 off", [variable("RAY_enable_autoscaler_v2", "1")], "without enableInTreeAutoscaling"),
    ("autoscaler twice", [cluster(**V2), variable("RAY_enable_autoscaler_v2", "0")], "use the first"),
    ("autoscaler v2", [cluster(**V2), pod(restartPolicy="Always")], "autoscaler v2 needs Never"),
    (
        "old Ray with a token",
        [cluster(authOptions={"mode": "token"}, rayVersion="2.51.0")],
        r"needs 2\.52\.0 or later, got 2\.51\.0",
    ),
    ("queue and selector", [metadata(**QUEUED), spec(clusterSelector=SELECTOR)], "with a cluster of their own"),
    (
        "queue and shutdown",
        [metadata(**QUEUED), spec(shutdownAfterJobFinishes=False, ttlSecondsAfterFinished=0)],
        "Kueue needs true",
    ),
    ("queue and autoscaling", [metadata(**QUEUED), cluster(enableInTreeAutoscaling=True)], "Kueue needs false"),
    ("queue and suspend", [metadata(**QUEUED), spec(suspend=False)], "Kueue's own field"),
    (
        "sick nodes",
        [pod(tolerations=[{"key": "sagemaker.amazonaws.com/node-health-status", "operator": "Exists"}])],
        "about to replace",
    ),
    ("every taint", [pod(tolerations=[{"operator": "Exists"}])], "about to replace"),
]


@pytest.mark.parametrize(("changes", "said"), [case[1:] for case in RULES], ids=[case[0] for case in RULES])
def test_each_rule(changes: list[Change], said: str) -> None:
    job = copy.deepcopy(ray_job())
    assert problems_of(job) == []
    for change in changes:
        change(job)
    found = problems_of(job)
    with pytest.raises(ConfigError, match=said):
        raise ConfigError(found)
    assert len(found) == 1, found


def test_eight_groups_are_too_many_for_kueue() -> None:
    job = copy.deepcopy(ray_job(queue="{name: team}"))
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    groups.extend({**groups[0], "groupName": f"w{number}"} for number in range(7))
    assert ["8 groups; Kueue takes 7" in problem for problem in problems_of(job)] == [True]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([rule("DeleteSelf")], "exactly one of jobStatus and jobDeploymentStatus"),
        ([rule("DeleteSelf", jobDeploymentStatus="Failed", **SUCCEEDED)], "exactly one of"),
        ([rule("DeleteSelf", **SUCCEEDED), rule("DeleteSelf", 5, **SUCCEEDED)], "a second rule DeleteSelf"),
        ([rule("DeleteWorkers", 9, **SUCCEEDED), rule("DeleteCluster", 5, **SUCCEEDED)], "comes before DeleteWorkers"),
    ],
)
def test_deletion_rules(rules: list[dict[str, Any]], said: str) -> None:
    job = copy.deepcopy(ray_job())
    job["spec"].update(
        shutdownAfterJobFinishes=False, ttlSecondsAfterFinished=0, deletionStrategy={"deletionRules": rules}
    )
    assert [said in problem for problem in problems_of(job)] == [True]


def test_deleting_workers_of_a_borrowed_or_scaled_cluster() -> None:
    rules = [rule("DeleteWorkers", **SUCCEEDED)]
    job = copy.deepcopy(ray_job())
    job["spec"].update(
        shutdownAfterJobFinishes=False, ttlSecondsAfterFinished=0, deletionStrategy={"deletionRules": rules}
    )
    job["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] = True
    assert ["does not work with enableInTreeAutoscaling" in problem for problem in problems_of(job)] == [True]
    job["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] = False
    job["spec"]["clusterSelector"] = SELECTOR
    assert ["only borrows" in problem for problem in problems_of(job)] == [True]


def test_a_cluster_of_somebody_else_is_checked_by_the_same_rules() -> None:
    spec_ = copy.deepcopy(ray_job()["spec"]["rayClusterSpec"])
    found = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "c" * 54}, "spec": spec_}
    assert problems_of(found) == [
        f"RayCluster {'c' * 54}: metadata.name: {'c' * 54} has 54 characters; KubeRay takes 53 for a RayCluster"
    ]


def test_the_old_version_is_refused() -> None:
    assert problems_of({**ray_job(), "apiVersion": "ray.io/v1alpha1"})[0].endswith("is deprecated; write ray.io/v1")


def test_wrong_types_do_not_end_the_check() -> None:
    job = copy.deepcopy(ray_job())
    job["spec"]["rayClusterSpec"]["headGroupSpec"] = "small"
    job["spec"]["backoffLimitt"] = 3
    found = problems_of(job)
    assert any("headGroupSpec: must be a mapping" in problem for problem in found)
    assert any("did you mean backoffLimit?" in problem for problem in found)


def test_the_bad_sample_gives_all_its_mistakes_at_once() -> None:
    if not SAMPLE.is_file():
        pytest.skip(f"{SAMPLE} is not here")
    (document,) = read_documents(SAMPLE)
    found = "\n".join(problems_of(document))
    for said in (
        'num-cpus: must be text, got 0; put it in quotes: "0"',
        '"64Gib" is no amount',
        "did you mean backoffLimit?",
    ):
        assert said in found
    assert "K8sjobmode is none of" in found
    assert len(found.splitlines()) == 4


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "immutable": "yes"},
            "immutable: must be",
        ),
        (
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "lables": {}}},
            r"metadata\.lables: there is no such field; did you mean labels\?",
        ),
        ({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "Not_A_Name"}}, "Not_A_Name: lower-case"),
        (
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "namespace": "Bad_NS"}},
            r"metadata\.namespace: Bad_NS: lower-case",
        ),
        ({"apiVersion": "ray.io/v1", "kind": "RayJobb", "metadata": {"name": "x"}}, "there is no such kind"),
        ({"kind": "Pod", "metadata": {"name": "x"}}, "there is no such kind"),
        ({"apiVersion": "apps/v1", "kind": "Toaster", "metadata": {"name": "x"}}, "there is no such kind"),
    ],
)
def test_objects_of_kubernetes_itself(document: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        raise ConfigError(problems_of(document))
