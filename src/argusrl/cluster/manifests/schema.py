"""What a field of an object may be: defaults, types, and names that no field has.

The API server prunes fields that it does not know without a word, so a schema alone finds no misspelt one.
"""

from __future__ import annotations

import copy
import difflib
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from argusrl.errors import ClusterError

Schema = Mapping[str, Any]
Path = tuple[str | int, ...]

_DATA = "kuberay_v1.json.gz"
_KEEPS_UNKNOWN = "x-kubernetes-preserve-unknown-fields"


@cache
def ray_job_schema() -> dict[str, Any]:
    """Of RayJob v1, as KubeRay 1.7.0 declares it."""
    data = resources.files("argusrl.cluster.manifests").joinpath(_DATA).read_bytes()
    schema: dict[str, Any] = json.loads(gzip.decompress(data))["schema"]
    return schema


@cache
def ray_cluster_schema() -> dict[str, Any]:
    """Of RayCluster v1: a RayJob holds all of its spec."""
    job = ray_job_schema()
    spec = job["properties"]["spec"]["properties"]["rayClusterSpec"]
    return {**job, "properties": {**job["properties"], "spec": spec}}


def with_defaults(value: Any, schema: Schema) -> Any:
    """A copy with what the API server would fill in."""
    if isinstance(value, dict):
        properties: Mapping[str, Schema] = schema.get("properties", {})
        other = schema.get("additionalProperties")
        result = {
            key: with_defaults(item, properties.get(key, other if isinstance(other, Mapping) else {}))
            for key, item in value.items()
        }
        for key, below in properties.items():
            if key not in result and "default" in below:
                result[key] = with_defaults(copy.deepcopy(below["default"]), below)
        return result
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items", {})) for item in value]
    return value


def schema_problems(value: Any, schema: Schema) -> list[str]:
    """Values that are not what the schema says. Raises ClusterError without the package jsonschema."""
    try:
        from jsonschema import Draft202012Validator
    except ImportError as error:
        raise ClusterError("the package jsonschema is missing", "pip install 'argusrl[cluster]'") from error
    errors = sorted(Draft202012Validator(schema).iter_errors(value), key=lambda error: [str(p) for p in error.path])
    return [f"{dotted(tuple(error.absolute_path))}: {_said(error)}" for error in errors]


def _said(error: Any) -> str:
    wanted, got = error.validator_value, json.dumps(error.instance, default=str)
    got = got if len(got) <= 60 else f"{got[:57]}…"
    if error.validator == "type":
        types = wanted if isinstance(wanted, str) else " or ".join(wanted)
        return f"must be {_ARTICLES.get(types, types)}, got {got}" + _quoting_hint(types, error.instance)
    if error.validator == "pattern":
        quantity = "KMGTPE" in wanted
        return f"{got} is no {'amount; write 500m, 8 or 16Gi' if quantity else f'match for {wanted}'}"
    if error.validator == "anyOf":
        return f"must be a number or text, got {got}"
    if error.validator == "required":
        return f"{error.message.split(' is a ')[0]} is missing"
    return str(error.message)


_ARTICLES = {
    "string": "text",
    "integer": "a whole number",
    "object": "a mapping",
    "array": "a list",
    "boolean": "true or false",
}


def _quoting_hint(types: str, instance: Any) -> str:
    return f'; put it in quotes: "{instance}"' if types == "string" and isinstance(instance, (int, float)) else ""


def unknown_fields(value: Any, schema: Schema, path: Path = ()) -> Iterator[str]:
    """Fields that the schema has not, with the name that was probably meant."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_fields(item, schema.get("items", {}), (*path, index))
    if not isinstance(value, dict):
        return
    properties: Mapping[str, Schema] = schema.get("properties", {})
    other = schema.get("additionalProperties")
    free = schema.get(_KEEPS_UNKNOWN) or (not properties and not other)
    for key, item in value.items():
        if key in properties:
            yield from unknown_fields(item, properties[key], (*path, key))
        elif isinstance(other, Mapping):
            yield from unknown_fields(item, other, (*path, key))
        elif not free and not other:
            yield f"{dotted((*path, key))}: there is no such field{meant(str(key), list(properties))}"


def meant(name: str, known: Sequence[str]) -> str:
    """ "; did you mean …?", where one is near."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def dotted(path: Path) -> str:
    """spec.workerGroupSpecs.0.replicas."""
    return ".".join(str(part) for part in path) or "the object"
