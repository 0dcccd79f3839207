"""Kubernetes objects as values, and as YAML that people read and compare."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from argusrl.config.yaml_file import dump_yaml

Object = dict[str, Any]

_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Document:
    """One object, and why it is as it is."""

    value: Object
    comment: str

    @property
    def kind(self) -> str:
        return str(self.value["kind"])


def to_yaml(documents: Iterable[Document]) -> str:
    """All objects in order, each under its comment. The same objects give the same bytes."""
    parts = []
    for document in documents:
        lines = [line for part in document.comment.split("\n") for line in textwrap.wrap(part, _WIDTH) or [""]]
        comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
        parts.append(f"---\n{comment}{dump_yaml(document.value, blocks=True)}")
    return "".join(parts)


def metadata(name: str, namespace: str | None, labels: dict[str, str], **annotations: str) -> Object:
    """An object's metadata; without a namespace it is cluster-scoped."""
    value: Object = {"name": name}
    if namespace is not None:
        value["namespace"] = namespace
    value["labels"] = dict(labels)
    if annotations:
        value["annotations"] = dict(annotations)
    return value
