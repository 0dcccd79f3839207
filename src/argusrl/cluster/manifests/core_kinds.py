"""Objects of Kubernetes itself, checked against the models of its Python client: fields, types, what is missing."""

from __future__ import annotations

import re
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from argusrl.cluster.manifests.schema import dotted, meant
from argusrl.errors import ClusterError

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LONGEST_NAME = 253
_LONGEST_NAMESPACE = 63
_BUILTIN_GROUPS = ("", "apps", "autoscaling", "batch", "policy")  # and *.k8s.io, but for *.x-k8s.io


def is_builtin(version: str) -> bool:
    """Whether an apiVersion is of Kubernetes itself; others are defined by CRDs."""
    group = version.rpartition("/")[0]
    return group in _BUILTIN_GROUPS or (group.endswith(".k8s.io") and not group.endswith(".x-k8s.io"))


def core_problems(document: dict[str, Any]) -> list[str]:
    """What is wrong with one object. Raises ClusterError without the package kubernetes."""
    try:
        from kubernetes.client import models
    except ImportError as error:
        raise ClusterError("the package kubernetes is missing", "pip install 'argusrl[cluster]'") from error
    model = _model(models, str(document.get("apiVersion", "")), str(document.get("kind", "")))
    if model is None:
        return [f"apiVersion {document.get('apiVersion')}, kind {document.get('kind')}: there is no such kind"]
    found = []
    try:
        model.model_validate(document)
    except ValidationError as error:
        found = [f"{dotted(details['loc'])}: {_said(details, model)}" for details in error.errors()]
    metadata = document.get("metadata")
    name = str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        found.append(
            f"metadata.name: {name or 'missing'}: lower-case letters, digits, - and ., at most {_LONGEST_NAME}"
        )
    space = metadata.get("namespace") if isinstance(metadata, dict) else None
    if space is not None and not _is_label(str(space)):
        found.append(f"metadata.namespace: {space}: lower-case letters, digits and -, at most {_LONGEST_NAMESPACE}")
    return found


def _is_label(text: str) -> bool:
    return len(text) <= _LONGEST_NAMESPACE and "." not in text and _NAME.fullmatch(text) is not None


def _model(models: Any, version: str, kind: str) -> type[BaseModel] | None:
    short = version.rpartition("/")[2]
    return getattr(models, f"{short[:1].upper()}{short[1:]}{kind}", None)


def _said(details: ErrorDetails, model: type[BaseModel]) -> str:
    if details["type"] == "extra_forbidden":
        return f"there is no such field{meant(str(details['loc'][-1]), _fields_at(model, details['loc'][:-1]))}"
    if details["type"] == "missing":
        return "missing"
    return f"{details['msg'].replace('Input should', 'must').replace('a valid ', 'a ')}, got {details['input']!r}"


def _fields_at(model: Any, path: tuple[str | int, ...]) -> list[str]:
    """Names of the fields that the object at `path` may have."""
    for part in path:
        if isinstance(part, int):
            continue
        fields = {field.serialization_alias or name: field for name, field in model.model_fields.items()}
        if part not in fields:
            return []
        model = _inner(fields[part].annotation)
        if model is None:
            return []
    return [field.serialization_alias or name for name, field in model.model_fields.items()]


def _inner(annotation: Any) -> Any:
    """The model in Optional[List[Model]]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_inner, get_args(annotation))), None)
