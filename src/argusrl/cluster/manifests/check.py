"""Whether Kubernetes, KubeRay and argusrl's own rules would take an object: everything that is wrong, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argusrl.cluster.manifests.core_kinds import core_problems, is_builtin
from argusrl.cluster.manifests.operator_rules import cluster_problems, job_problems
from argusrl.cluster.manifests.placement import HEALTH_LABEL
from argusrl.cluster.manifests.schema import (
    ray_cluster_schema,
    ray_job_schema,
    schema_problems,
    unknown_fields,
    with_defaults,
)
from argusrl.config.yaml_file import yaml_problem
from argusrl.errors import ConfigError

Object = dict[str, Any]

_RAY = "ray.io/v1"
_OLD_RAY = "ray.io/v1alpha1"
_OTHER_RAY_KINDS = ("RayService", "RayCronJob")  # KubeRay's, which argusrl has no schema of


def read_documents(path: Path) -> list[Object]:
    """Objects of a YAML file, those of a List one by one. Raises ConfigError."""
    import yaml

    try:
        values = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(yaml_problem(error, str(path))) from None
    documents = [one for value in values if value is not None for one in _unpacked(value)]
    if not documents or not all(isinstance(value, dict) for value in documents):
        raise ConfigError(f"{path}: holds no Kubernetes objects")
    if any("kind" not in value and "apiVersion" not in value and "model" in value for value in documents):
        raise ConfigError(
            f"{path}: looks like a recipe, and --check takes Kubernetes objects",
            f"leave --check out: argusrl cluster manifest {path} --validate",
        )
    return documents


def _unpacked(value: Any) -> list[Any]:
    """A List holds objects; anything else is one."""
    if isinstance(value, dict) and value.get("kind") == "List" and isinstance(value.get("items"), list):
        return list(value["items"])
    return [value]


def label_of(document: Object) -> str:
    """Kind and name, for messages."""
    metadata = document.get("metadata")
    name = metadata.get("name", "?") if isinstance(metadata, dict) else "?"
    return f"{document.get('kind')} {name}"


def unchecked(document: Object) -> str:
    """Why nothing is known of an object: it is of a kind that somebody's CRD defines. Empty where it is checked."""
    kind, version = document.get("kind"), document.get("apiVersion")
    if not isinstance(kind, str) or not isinstance(version, str) or is_builtin(version):
        return ""
    if version in (_RAY, _OLD_RAY) and kind not in _OTHER_RAY_KINDS:
        return ""
    return f"{label_of(document)}: {version} is not known here, and not checked"


def problems_of(document: Object) -> list[str]:
    """Each begins with kind and name of the object, and names the field. Raises ClusterError without jsonschema.

    Nothing is said of kinds that `unchecked` names.
    """
    kind, version = document.get("kind"), document.get("apiVersion")
    if unchecked(document):
        found = []
    elif version == _OLD_RAY:
        found = [f"apiVersion: {_OLD_RAY} is deprecated; write {_RAY}"]
    elif version == _RAY and kind in ("RayJob", "RayCluster"):
        found = _ray_problems(document, job=kind == "RayJob")
    else:
        found = core_problems(document)
    return [f"{label_of(document)}: {problem}" for problem in dict.fromkeys(found)]


def _ray_problems(document: Object, *, job: bool) -> list[str]:
    schema = ray_job_schema() if job else ray_cluster_schema()
    filled = with_defaults({key: value for key, value in document.items() if key != "status"}, schema)
    found = schema_problems(filled, schema)
    known = {**schema, "properties": {**schema["properties"], "metadata": {}}}
    found += unknown_fields(filled, known)
    if not isinstance(filled.get("spec"), dict):
        return [*found, "spec: missing"]
    try:
        found += (job_problems if job else cluster_problems)(filled)
        cluster = filled["spec"].get("rayClusterSpec") if job else filled["spec"]
        found += _own_problems(cluster or {}, "spec.rayClusterSpec" if job else "spec")
    except (AttributeError, TypeError):
        pass  # something has the wrong type, which the schema has said; rules speak of right ones
    return found


def _own_problems(cluster: Object, at: str) -> list[str]:
    """Nobody else refuses these, and each has cost somebody a run."""
    found = []
    groups = [(cluster.get("headGroupSpec") or {}, f"{at}.headGroupSpec")]
    groups += [
        (group, f"{at}.workerGroupSpecs.{index}") for index, group in enumerate(cluster.get("workerGroupSpecs") or [])
    ]
    for group, where in groups:
        spec = (group.get("template") or {}).get("spec") or {}
        for index, toleration in enumerate(spec.get("tolerations") or []):
            if _tolerates_sick_nodes(toleration):
                found.append(
                    f"{where}.template.spec.tolerations.{index}: tolerates {HEALTH_LABEL}: pods would go to nodes that "
                    "HyperPod is about to replace"
                )
    return found


def _tolerates_sick_nodes(toleration: Object) -> bool:
    key = toleration.get("key")
    everything = not key and toleration.get("operator") == "Exists"
    return (everything or key == HEALTH_LABEL) and toleration.get("effect") in (None, "", "NoSchedule")
