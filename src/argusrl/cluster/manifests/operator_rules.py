"""What KubeRay's operator refuses beyond its schema (validation.go of 1.7), Kueue's limits, and the schema's CEL rules.

Rules are functions from an object's spec to what is wrong with it. `submissionMode` is plain text in the schema, so a
misspelt one is found here alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import yaml

from argusrl.cluster.manifests.schema import meant

Object = Mapping[str, Any]

SUBMISSION_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
RAYJOB_NAME_LENGTH, RAYCLUSTER_NAME_LENGTH = 47, 53
KUEUE_WORKER_GROUPS = 7

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_START_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
_FT_ANNOTATION, _FT_NAMESPACE = "ray.io/ft-enabled", "ray.io/external-storage-namespace"
_DELETION_ORDER = ("DeleteWorkers", "DeleteCluster", "DeleteSelf")
_AUTOSCALER_V2 = "RAY_enable_autoscaler_v2"
_TRUE = ("1", "true")


def job_problems(job: Object) -> Iterator[str]:
    """Of a RayJob, with defaults filled in."""
    metadata, spec = job.get("metadata") or {}, job.get("spec") or {}
    yield from _name(metadata, "RayJob", RAYJOB_NAME_LENGTH)
    yield from _mode(spec)
    yield from _limits(spec)
    yield from _runtime_env(spec)
    yield from _suspension(spec)
    yield from _selector(spec)
    yield from _deletion(spec)
    yield from _manager(spec, "spec")
    yield from _kueue(metadata, spec)
    cluster = spec.get("rayClusterSpec")
    if cluster is not None:
        yield from _cluster(cluster, metadata.get("annotations") or {}, "spec.rayClusterSpec")
        if (cluster.get("authOptions") or {}).get("enableK8sTokenAuth"):
            yield "spec.rayClusterSpec.authOptions: a RayJob cannot use Kubernetes' tokens; guard it by a NetworkPolicy"


def cluster_problems(cluster: Object) -> Iterator[str]:
    """Of a RayCluster, with defaults filled in."""
    metadata, spec = cluster.get("metadata") or {}, cluster.get("spec") or {}
    yield from _name(metadata, "RayCluster", RAYCLUSTER_NAME_LENGTH)
    yield from _cluster(spec, metadata.get("annotations") or {}, "spec")


def _name(metadata: Object, kind: str, longest: int) -> Iterator[str]:
    name = str(metadata.get("name", ""))
    if len(name) > longest:
        yield f"metadata.name: {name} has {len(name)} characters; KubeRay takes {longest} for a {kind}"
    if not _DNS_1035.fullmatch(name):
        yield f"metadata.name: {name or 'missing'}: lower-case letters, digits and -, beginning with a letter"


def _mode(spec: Object) -> Iterator[str]:
    mode = spec.get("submissionMode")
    if mode not in SUBMISSION_MODES:
        yield f"spec.submissionMode: {mode} is none of {', '.join(SUBMISSION_MODES)}" + meant(
            str(mode), SUBMISSION_MODES
        )
    if mode == "InteractiveMode" and _number(spec, "backoffLimit") > 0:
        yield "spec.backoffLimit: InteractiveMode does not retry; set it to 0"
    if mode == "SidecarMode":
        for field in ("submitterPodTemplate", "submitterConfig"):
            if spec.get(field) is not None:
                yield f"spec.{field}: SidecarMode has no submitter; leave it out"
        head = ((spec.get("rayClusterSpec") or {}).get("headGroupSpec") or {}).get("template") or {}
        if (head.get("spec") or {}).get("restartPolicy", "Never") != "Never":
            yield "spec.rayClusterSpec.headGroupSpec.template.spec.restartPolicy: must be Never in SidecarMode"


def _limits(spec: Object) -> Iterator[str]:
    if spec.get("activeDeadlineSeconds") is not None and _number(spec, "activeDeadlineSeconds") <= 0:
        yield "spec.activeDeadlineSeconds: must be above 0, or left out"
    if _number(spec, "backoffLimit") < 0:
        yield "spec.backoffLimit: must not be below 0"
    ttl = _number(spec, "ttlSecondsAfterFinished")
    if ttl < 0:
        yield "spec.ttlSecondsAfterFinished: must not be below 0"
    if ttl > 0 and not spec.get("shutdownAfterJobFinishes"):
        yield "spec.ttlSecondsAfterFinished: only with shutdownAfterJobFinishes: true"


def _runtime_env(spec: Object) -> Iterator[str]:
    text = spec.get("runtimeEnvYAML")
    try:
        value = yaml.safe_load(text) if isinstance(text, str) else None
    except yaml.YAMLError as error:
        yield f"spec.runtimeEnvYAML: not YAML: {str(error).splitlines()[0]}"
        return
    if value is not None and not isinstance(value, dict):
        yield "spec.runtimeEnvYAML: must be a mapping"


def _suspension(spec: Object) -> Iterator[str]:
    if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
        yield "spec.suspend: only with shutdownAfterJobFinishes: true"


def _selector(spec: Object) -> Iterator[str]:
    selector = spec.get("clusterSelector")
    if not selector:
        if spec.get("rayClusterSpec") is None:
            yield "spec: needs rayClusterSpec, or a clusterSelector"
        return
    if not selector.get("ray.io/cluster"):
        yield "spec.clusterSelector: must name a cluster under ray.io/cluster"
    if _number(spec, "backoffLimit") > 0:
        yield "spec.backoffLimit: a retry makes a new cluster, and clusterSelector names one; set it to 0"
    if spec.get("suspend"):
        yield "spec.suspend: not with clusterSelector"
    if spec.get("submissionMode") == "SidecarMode":
        yield "spec.submissionMode: SidecarMode does not work with clusterSelector"


def _deletion(spec: Object) -> Iterator[str]:
    strategy = spec.get("deletionStrategy")
    if strategy is None:
        return
    at = "spec.deletionStrategy"
    rules = strategy.get("deletionRules") or []
    legacy = {name: strategy[name] for name in ("onSuccess", "onFailure") if strategy.get(name) is not None}
    if rules and legacy:
        yield f"{at}: either deletionRules, or onSuccess and onFailure"
    if not rules and len(legacy) < 2:
        yield f"{at}: needs deletionRules, or both onSuccess and onFailure"
    if rules and spec.get("shutdownAfterJobFinishes"):
        yield f"{at}.deletionRules: not with shutdownAfterJobFinishes: true"
    for name, value in legacy.items():
        policy = value.get("policy")
        if policy is None:
            yield f"{at}.{name}.policy: missing"
        elif policy == "DeleteNone" and spec.get("shutdownAfterJobFinishes"):
            yield f"{at}.{name}.policy: DeleteNone contradicts shutdownAfterJobFinishes: true"
        yield from _policy(spec, policy, f"{at}.{name}.policy")
    yield from _deletion_rules(spec, rules, f"{at}.deletionRules")


def _policy(spec: Object, policy: Any, at: str) -> Iterator[str]:
    if spec.get("clusterSelector") and policy in ("DeleteCluster", "DeleteWorkers"):
        yield f"{at}: {policy} would delete a cluster that this job only borrows (clusterSelector)"
    if policy == "DeleteWorkers" and (spec.get("rayClusterSpec") or {}).get("enableInTreeAutoscaling"):
        yield f"{at}: DeleteWorkers does not work with enableInTreeAutoscaling: true"


def _deletion_rules(spec: Object, rules: list[Object], at: str) -> Iterator[str]:
    seconds: dict[tuple[Any, Any], dict[str, int]] = {}
    for index, rule in enumerate(rules):
        condition, policy = rule.get("condition") or {}, rule.get("policy")
        given = [name for name in ("jobStatus", "jobDeploymentStatus") if condition.get(name) is not None]
        if len(given) != 1:
            yield f"{at}.{index}.condition: exactly one of jobStatus and jobDeploymentStatus"
        if _number(condition, "ttlSeconds") < 0:
            yield f"{at}.{index}.condition.ttlSeconds: must not be below 0"
        yield from _policy(spec, policy, f"{at}.{index}.policy")
        status = (condition.get("jobStatus"), condition.get("jobDeploymentStatus"))
        known = seconds.setdefault(status, {})
        if policy in known:
            yield f"{at}.{index}: a second rule {policy} for {status[0] or status[1]}"
        known.setdefault(str(policy), _number(condition, "ttlSeconds"))
    for status, known in seconds.items():
        ordered = [(policy, known[policy]) for policy in _DELETION_ORDER if policy in known]
        for (first, early), (then, late) in pairwise(ordered):
            if late < early:
                yield f"{at}: for {status[0] or status[1]} {then} ({late} s) comes before {first} ({early} s)"


def _manager(spec: Object, at: str) -> Iterator[str]:
    manager = spec.get("managedBy")
    if manager is not None and manager not in MANAGERS:
        yield f"{at}.managedBy: {manager} is none of {', '.join(MANAGERS)}"


def _kueue(metadata: Object, spec: Object) -> Iterator[str]:
    if "kueue.x-k8s.io/queue-name" not in (metadata.get("labels") or {}):
        return
    cluster = spec.get("rayClusterSpec") or {}
    if spec.get("clusterSelector"):
        yield "spec.clusterSelector: Kueue takes only jobs with a cluster of their own"
    if not spec.get("shutdownAfterJobFinishes"):
        yield "spec.shutdownAfterJobFinishes: Kueue needs true"
    if cluster.get("enableInTreeAutoscaling"):
        yield "spec.rayClusterSpec.enableInTreeAutoscaling: Kueue needs false"
    groups = len(cluster.get("workerGroupSpecs") or [])
    if groups > KUEUE_WORKER_GROUPS:
        yield f"spec.rayClusterSpec.workerGroupSpecs: {groups} groups; Kueue takes {KUEUE_WORKER_GROUPS}"
    if spec.get("suspend") is False:
        yield "spec.suspend: Kueue's own field; leave it out"


def _cluster(spec: Object, annotations: Object, at: str) -> Iterator[str]:
    yield from _manager(spec, at)
    head = spec.get("headGroupSpec") or {}
    workers = [group for group in spec.get("workerGroupSpecs") or [] if isinstance(group, Mapping)]
    groups = [(head, f"{at}.headGroupSpec")]
    groups += [(group, f"{at}.workerGroupSpecs.{index}") for index, group in enumerate(workers)]
    for group, where in groups:
        yield from _group(group, where)
    for group, where in groups[1:]:
        yield from _worker_group(group, spec, where)
    yield from _fault_tolerance(spec, head, annotations, at)
    yield from _autoscaling(spec, groups, at)
    yield from _token(spec, at)


def _group(group: Object, at: str) -> Iterator[str]:
    if not _containers(group):
        yield f"{at}.template.spec.containers: needs a container, Ray's own as the first"
    parameters, resources = group.get("rayStartParams") or {}, group.get("resources") or {}
    if resources and any(parameters.get(name) for name in _START_RESOURCES):
        yield f"{at}: amounts both in rayStartParams and in resources; use one of them"
    if "labels" in parameters:
        yield f"{at}.rayStartParams.labels: not supported; use {at.rpartition('.')[2]}.labels"
    for key, value in (group.get("labels") or {}).items():
        if not _LABEL_KEY.fullmatch(str(key)):
            yield f"{at}.labels: {key} is no name of a label"
        if not _LABEL_VALUE.fullmatch(str(value)):
            yield f"{at}.labels.{key}: {value} is no value of a label"


def _worker_group(group: Object, spec: Object, at: str) -> Iterator[str]:
    least, most = _number(group, "minReplicas"), _number(group, "maxReplicas")
    if least > most:
        yield f"{at}: minReplicas {least} is above maxReplicas {most}"
    if group.get("suspend") and spec.get("enableInTreeAutoscaling"):
        yield f"{at}.suspend: not with enableInTreeAutoscaling: true"


def _fault_tolerance(spec: Object, head: Object, annotations: Object, at: str) -> Iterator[str]:
    options = spec.get("gcsFaultToleranceOptions")
    variables, parameters = _variables(head), head.get("rayStartParams") or {}
    if options is not None:
        if annotations.get(_FT_ANNOTATION):
            yield f"metadata.annotations: {_FT_ANNOTATION} and gcsFaultToleranceOptions; use only the options"
        if annotations.get(_FT_NAMESPACE):
            yield f"metadata.annotations: {_FT_NAMESPACE}; write gcsFaultToleranceOptions.externalStorageNamespace"
        if options.get("backend") == "rocksdb":
            yield f"{at}.gcsFaultToleranceOptions.backend: rocksdb is alpha: off unless its gate is open"
        if parameters.get("redis-password"):
            yield f"{at}.headGroupSpec.rayStartParams: redis-password; write gcsFaultToleranceOptions.redisPassword"
        for name in ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS"):
            if name in variables:
                yield f"{at}.headGroupSpec: the variable {name}; write it into gcsFaultToleranceOptions"
    elif "RAY_REDIS_ADDRESS" in variables and annotations.get(_FT_ANNOTATION) != "true":
        yield f"{at}.headGroupSpec: RAY_REDIS_ADDRESS turns on fault tolerance of the GCS; use gcsFaultToleranceOptions"
    if parameters.get("redis-username") or "REDIS_USERNAME" in variables:
        yield f"{at}.headGroupSpec: a Redis user goes into gcsFaultToleranceOptions.redisUsername"


def _autoscaling(spec: Object, groups: list[tuple[Object, str]], at: str) -> Iterator[str]:
    variable = _variables(groups[0][0]).get(_AUTOSCALER_V2)
    options = spec.get("autoscalerOptions") or {}
    if not spec.get("enableInTreeAutoscaling"):
        if variable in _TRUE:
            yield f"{at}.headGroupSpec: {_AUTOSCALER_V2} without enableInTreeAutoscaling: true"
        return
    if options.get("version") is not None and variable is not None:
        yield f"{at}: both autoscalerOptions.version and the variable {_AUTOSCALER_V2}; use the first"
    if options.get("version") == "v2" or variable in _TRUE:
        for group, where in groups:
            policy = ((group.get("template") or {}).get("spec") or {}).get("restartPolicy")
            if policy not in (None, "", "Never"):
                yield f"{where}.template.spec.restartPolicy: {policy}; autoscaler v2 needs Never"


def _token(spec: Object, at: str) -> Iterator[str]:
    if (spec.get("authOptions") or {}).get("mode") != "token":
        return
    found = re.match(r"v?(\d+)\.(\d+)", str(spec.get("rayVersion", "")))
    if found is None or (int(found[1]), int(found[2])) < (2, 52):
        yield f"{at}.rayVersion: mode token needs 2.52.0 or later, got {spec.get('rayVersion') or 'nothing'}"


def _containers(group: Object) -> list[Any]:
    containers = ((group.get("template") or {}).get("spec") or {}).get("containers")
    return containers if isinstance(containers, list) else []


def _variables(group: Object) -> dict[str, Any]:
    """Of the Ray container, which is the first."""
    containers = _containers(group)
    variables = containers[0].get("env") or [] if containers and isinstance(containers[0], Mapping) else []
    return {str(item.get("name")): item.get("value") for item in variables if isinstance(item, Mapping)}


def _number(holder: Object, key: str) -> int:
    value = holder.get(key)
    return value if isinstance(value, int) else 0
