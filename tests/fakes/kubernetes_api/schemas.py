"""What the API server does to an object before it keeps it: defaults, pruning, validation.

Custom resources by the structural schemas of KubeRay's CRDs, core kinds by the models of the official client.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from argusrl.cluster.kinds import RAY_CLUSTER, RAY_JOB, Kind
from argusrl.cluster.manifests.schema import ray_cluster_schema, ray_job_schema
from fakes.kubernetes_api.patches import clone

_ROOT = Path(__file__).resolve().parents[3]
_RAW = _ROOT.parent / "shared/cluster/crds/kuberay-v1.7.0"
_QUANTITIES = {"limits", "requests", "capacity", "allocatable", "hard", "sizeLimit", "overhead", "min", "max"}
_CUSTOM = {RAY_JOB.name: "rayjobs", RAY_CLUSTER.name: "rayclusters"}

Admission = tuple[list[str], list[str], dict[str, Any]]  # unknown fields, wrong ones, the object


class Schemas:
    """The schemas of a cluster with KubeRay."""

    def __init__(self, custom: dict[str, dict[str, Any]] | None = None) -> None:
        self._custom = custom

    def admit(self, kind: Kind, document: dict[str, Any]) -> Admission:
        """Unknown fields, what else is wrong, and the object with defaults and without unknown fields."""
        schema = self._custom.get(kind.name) if self._custom is not None else crd_schema(kind.name)
        if schema is not None:
            return _admit_custom(kind.name, schema, document)
        model = _model(kind)
        if model is None:
            return [], [], document
        unknown: list[str] = []
        admitted = _prune_model(model, document, "", unknown)
        return unknown, _model_problems(model, admitted), admitted


@functools.cache
def crd_schema(kind: str) -> dict[str, Any] | None:
    """The v1 schema of a kind of KubeRay; None where there is none here, and for any other kind."""
    plural = _CUSTOM.get(kind)
    if plural is None:
        return None
    raw = _RAW / f"ray.io_{plural}.yaml"
    if raw.is_file():
        import yaml

        definition = yaml.load(raw.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        versions = {version["name"]: version for version in definition["spec"]["versions"]}
        found: dict[str, Any] = versions["v1"]["schema"]["openAPIV3Schema"]
        return found
    return {RAY_JOB.name: ray_job_schema, RAY_CLUSTER.name: ray_cluster_schema}[kind]()


def _admit_custom(name: str, schema: dict[str, Any], document: dict[str, Any]) -> Admission:
    unknown: list[str] = []
    head = {part: clone(document[part]) for part in ("apiVersion", "kind", "metadata") if part in document}
    body = {part: value for part, value in document.items() if part not in head}
    properties = {part: one for part, one in schema.get("properties", {}).items() if part not in head}
    admitted = {**head, **_shaped({**schema, "properties": properties}, body, "", unknown)}
    problems = [
        f"{'.'.join(map(str, error.absolute_path))}: Invalid value: {error.message[:300]}"
        for error in _validator(name, json.dumps(schema)).iter_errors(admitted)
    ]
    return unknown, problems, admitted


def _shaped(schema: dict[str, Any], value: Any, path: str, unknown: list[str]) -> Any:
    """With defaults and without unknown fields."""
    if isinstance(value, list):
        items = schema.get("items", {})
        return [_shaped(items, one, f"{path}[{place}]", unknown) for place, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    properties, more = schema.get("properties", {}), schema.get("additionalProperties")
    keep = schema.get("x-kubernetes-preserve-unknown-fields", False)
    result: dict[str, Any] = {}
    for name, one in value.items():
        here = f"{path}.{name}" if path else name
        if name in properties:
            if one is None and not properties[name].get("nullable"):
                continue  # as if it were absent
            result[name] = _shaped(properties[name], one, here, unknown)
        elif isinstance(more, dict):
            result[name] = _shaped(more, one, here, unknown)
        elif more is True or keep:
            result[name] = clone(one)
        else:
            unknown.append(here)
    for name, one in properties.items():
        if name not in result and "default" in one:
            result[name] = _shaped(one, clone(one["default"]), f"{path}.{name}", [])
    return result


@functools.cache
def _validator(name: str, schema: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(_with_nulls(json.loads(schema)))


def _with_nulls(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_nulls(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: _with_nulls(one) for name, one in schema.items()}
    if result.get("nullable") is True and isinstance(result.get("type"), str):
        result["type"] = [result["type"], "null"]
    return result


@functools.cache
def _model(kind: Kind) -> Any:
    """The client's model of a core kind; None for kinds that it does not know."""
    from kubernetes import client

    if kind.name in ("CustomResourceDefinition", "SelfSubjectAccessReview"):
        return None
    return getattr(client, "CoreV1Event" if kind.name == "Event" else f"V1{kind.name}", None)


@functools.cache
def _fields(model: Any) -> dict[str, Any]:
    """JSON name of a field → the model within it, or None."""
    found = {}
    for name, one in model.model_fields.items():
        found[one.serialization_alias or one.alias or name] = _inner(one.annotation)
    return found


def _inner(annotation: Any) -> Any:
    """The model in Optional[Model] and List[Model]; mappings are not looked into."""
    if hasattr(annotation, "model_fields"):
        return annotation
    if getattr(annotation, "__origin__", None) is dict:
        return None
    for part in getattr(annotation, "__args__", ()):
        if (found := _inner(part)) is not None:
            return found
    return None


def _prune_model(model: Any, value: Any, path: str, unknown: list[str]) -> Any:
    if isinstance(value, list):
        return [_prune_model(model, one, f"{path}[{place}]", unknown) for place, one in enumerate(value)]
    if not isinstance(value, dict):
        return value
    fields, result = _fields(model), {}
    for name, one in value.items():
        here = f"{path}.{name}" if path else name
        if name not in fields:
            unknown.append(here)
        elif fields[name] is None or one is None:
            result[name] = clone(one)
        else:
            result[name] = _prune_model(fields[name], one, here, unknown)
    return result


def _model_problems(model: Any, document: dict[str, Any]) -> list[str]:
    """Wrong types and missing fields; quantities may be numbers, and a status is what the test says it is."""
    from pydantic import ValidationError

    try:
        model.model_validate(document)
    except ValidationError as error:
        return [
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
            for one in error.errors()
            if one["loc"][0] != "status" and not _QUANTITIES & {str(part) for part in one["loc"]}
        ]
    return []
