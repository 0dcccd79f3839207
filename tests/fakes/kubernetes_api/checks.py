"""What the API server refuses, and in which words."""

from __future__ import annotations

import re
from typing import Any

from argusrl.cluster.kinds import Kind
from fakes.kubernetes_api import patches
from fakes.kubernetes_api.errors import ApiError

Object = dict[str, Any]

_NAME = re.compile(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
_POD_SPEC_CHANGEABLE = {"activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds"}


def checked_identity(kind: Kind, document: Object, namespace: str) -> Object:
    for name, wanted in (("apiVersion", kind.api_version), ("kind", kind.name)):
        if document.setdefault(name, wanted) != wanted:
            raise ApiError(400, f"{name} {document[name]} does not match the expected {wanted}")
    meta = document.setdefault("metadata", {})
    if kind.namespaced:
        if meta.setdefault("namespace", namespace) != namespace:
            raise ApiError(
                400, f"the namespace of the object ({meta['namespace']}) does not match the request ({namespace})"
            )
    else:
        meta.pop("namespace", None)
    return document


def check_name(kind: Kind, name: str) -> None:
    if not name:
        raise invalid(kind, name, "metadata.name: Required value: name or generateName is required")
    if kind.group != "rbac.authorization.k8s.io" and (len(name) > 253 or not _NAME.match(name)):
        raise invalid(kind, name, f'metadata.name: Invalid value: "{name}": must be a DNS-1123 subdomain')


def check_preconditions(kind: Kind, found: Object, uid: str | None, version: str | None) -> None:
    meta = found["metadata"]
    if uid is not None and uid != meta["uid"]:
        problem = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {meta['uid']}"
    elif version is not None and version != meta["resourceVersion"]:
        problem = "the object has been modified; please apply your changes to the latest version and try again"
    else:
        return
    message = f'Operation cannot be fulfilled on {resource(kind)} "{meta["name"]}": {problem}'
    raise ApiError(409, message, details=details(kind, meta["name"]))


def check_owners(kind: Kind, name: str, owners: dict[str, Object], manager: str, wanted: Object, force: bool) -> None:
    mine = patches.leaves({part: value for part, value in wanted.items() if part not in ("apiVersion", "kind")})
    for other in [other for other in owners if other != manager]:
        theirs = patches.leaves(owners[other])
        clashes = [path for path, value in mine.items() if path in theirs and theirs[path] != value]
        if clashes and not force:
            paths = ", ".join("." + ".".join(path) for path in clashes)
            raise ApiError(409, f'Apply failed with conflict: conflict with "{other}": {paths}')


def check_pod_change(old: Object, new: Object) -> None:
    before, after = (
        {name: value for name, value in one.get("spec", {}).items() if name not in _POD_SPEC_CHANGEABLE}
        for one in (old, new)
    )
    for spec in (before, after):
        spec["containers"] = [{**container, "image": ""} for container in spec.get("containers", [])]
    if "nodeName" not in before:  # the scheduler binds it
        after.pop("nodeName", None)
    if before != after:
        name = old["metadata"]["name"]
        raise ApiError(422, f'Pod "{name}" is invalid: spec: Forbidden: pod updates may not change fields other than …')


def invalid(kind: Kind, name: str, *problems: str) -> ApiError:
    listed = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
    group = f"{kind.name}.{kind.group}" if kind.group else kind.name
    return ApiError(422, f'{group} "{name}" is invalid: {listed}', details=details(kind, name))


def missing(kind: Kind, name: str) -> ApiError:
    return ApiError(404, f'{resource(kind)} "{name}" not found', details=details(kind, name))


def resource(kind: Kind) -> str:
    return f"{kind.plural}.{kind.group}" if kind.group else kind.plural


def details(kind: Kind, name: str) -> Object:
    return {"name": name, "group": kind.group, "kind": kind.plural}
