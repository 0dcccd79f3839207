"""The ways in which Kubernetes changes an object: merge, strategic merge, JSON patch, and server-side apply."""

from __future__ import annotations

from typing import Any


class BadPatch(Exception):
    """The patch cannot be applied."""


def clone(value: Any) -> Any:
    """A deep copy of JSON."""
    if isinstance(value, dict):
        return {name: clone(one) for name, one in value.items()}
    return [clone(one) for one in value] if isinstance(value, list) else value


def merge(target: Any, patch: Any, *, by_name: bool = False) -> Any:
    """RFC 7386; with `by_name` lists of named things are merged item by item, as strategic merge does it."""
    if not isinstance(patch, dict):
        return clone(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif by_name and _named(value) and _named(result.get(name)):
            result[name] = _merge_named(result[name], value)
        else:
            result[name] = merge(result.get(name), value, by_name=by_name)
    return result


def _named(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "name" in one for one in value)


def _merge_named(old: list[Any], new: list[Any]) -> list[Any]:
    result = {one["name"]: one for one in old}
    for one in new:
        result[one["name"]] = merge(result.get(one["name"], {}), one, by_name=True)
    return list(result.values())


def json_patch(target: Any, operations: list[dict[str, Any]]) -> Any:
    """RFC 6902 with add, remove, replace and test."""
    result = clone(target)
    for operation in operations:
        parts = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        parent = result
        try:
            for part in parts[:-1]:
                parent = parent[int(part)] if isinstance(parent, list) else parent[part]
            _operate(parent, parts[-1], operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise BadPatch(f"{operation['op']} {operation['path']}: {error}") from error
    return result


def _operate(parent: Any, name: str, operation: dict[str, Any]) -> None:
    kind, value = operation["op"], operation.get("value")
    if isinstance(parent, list):
        place = len(parent) if name == "-" else int(name)
        if kind == "add":
            parent.insert(place, value)
            return
        key: Any = place
    else:
        key = name
        if kind == "add":
            parent[key] = value
            return
    if kind == "replace":
        parent[key]  # must be there
        parent[key] = value
    elif kind == "remove":
        del parent[key]
    elif kind == "test":
        if parent[key] != value:
            raise ValueError(f"is {parent[key]!r}, not {value!r}")
    else:
        raise ValueError(f"operation {kind} is not known")


def apply(live: Any, before: Any, wanted: Any) -> Any:
    """Server-side apply: what `before` (the last applied) had and `wanted` has not is removed, the rest is set."""
    if isinstance(wanted, dict):
        result = dict(live) if isinstance(live, dict) else {}
        before = before if isinstance(before, dict) else {}
        for name in before.keys() - wanted.keys():
            result.pop(name, None)
        for name, value in wanted.items():
            result[name] = apply(result.get(name), before.get(name), value)
        return result
    if _named(wanted) and _named(live):
        return _apply_named(live, before if _named(before) else [], wanted)
    return clone(wanted)


def _apply_named(live: list[Any], before: list[Any], wanted: list[Any]) -> list[Any]:
    old, new = ({one["name"]: one for one in items} for items in (before, wanted))
    kept = [one for one in live if one["name"] in new or one["name"] not in old]
    result = {one["name"]: one for one in kept}
    for name, one in new.items():
        result[name] = apply(result.get(name), old.get(name), one)
    return list(result.values())


def leaves(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every scalar and list by its path of keys."""
    if isinstance(value, dict) and value:
        found: dict[tuple[str, ...], Any] = {}
        for name, one in value.items():
            found |= leaves(one, (*path, name))
        return found
    return {path: value}
