"""Label and field selectors."""

from __future__ import annotations

import re
from typing import Any

_SET = re.compile(r"^\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*$")
_FIELDS = {
    "Pod": {"spec.nodeName", "spec.restartPolicy", "spec.serviceAccountName", "status.phase", "status.podIP"},
    "Node": {"spec.unschedulable"},
    "Event": {
        *(f"involvedObject.{name}" for name in ("kind", "namespace", "name", "uid", "apiVersion", "fieldPath")),
        *("reason", "type", "source", "reportingComponent"),
    },
    "Secret": {"type"},
    "Namespace": {"status.phase"},
}


def matches(found: dict[str, Any], labels: str, fields: str) -> bool:
    """Whether an object is chosen. Raises ValueError for a selector that the API server would not take."""
    has = found["metadata"].get("labels") or {}
    return all(_label(has, term) for term in _terms(labels)) and all(_field(found, term) for term in _terms(fields))


def _terms(selector: str) -> list[str]:
    return [term for term in re.split(r",(?![^(]*\))", selector) if term.strip()]


def _label(labels: dict[str, str], term: str) -> bool:
    if found := _SET.match(term):
        key, operator, values = found.groups()
        inside = labels.get(key) in [value.strip() for value in values.split(",")]
        return inside if operator == "in" else not inside
    if "!=" in term:
        key, value = term.split("!=")
        return labels.get(key.strip()) != value.strip()
    if "=" in term:
        key, value = term.replace("==", "=").split("=")
        return labels.get(key.strip()) == value.strip()
    return term[1:].strip() not in labels if term.startswith("!") else term.strip() in labels


def _field(found: dict[str, Any], term: str) -> bool:
    different = "!=" in term
    key, value = term.replace("!=", "=").replace("==", "=").split("=")
    if key not in {"metadata.name", "metadata.namespace", *_FIELDS.get(found["kind"], ())}:
        raise ValueError(f'field label not supported: "{key}"')
    here: Any = found
    for part in key.split("."):
        here = here.get(part, "") if isinstance(here, dict) else ""
    text = str(here).lower() if isinstance(here, bool) else str(here)
    return (text == value) is not different
