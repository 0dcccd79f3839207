"""Objects of a cluster, and the rules by which the API server keeps them: versions, conflicts, deletion, ownership."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from argusrl.cluster.kinds import KINDS, NAMESPACE, POD, Kind
from fakes.kubernetes_api import checks, collector, patches
from fakes.kubernetes_api.errors import ApiError
from fakes.kubernetes_api.patches import clone
from fakes.kubernetes_api.schemas import Schemas
from fakes.kubernetes_api.selectors import matches

Object = dict[str, Any]
Key = tuple[str, str]  # namespace, name

_WITH_STATUS = {"Pod", "Deployment", "DaemonSet", "Job", "RayJob", "RayCluster", "Workload", "PersistentVolumeClaim"}
_STATUS_FROM_CREATE = {"Node"}  # the kubelet registers itself with one
_SERVER_OWNED = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")


@dataclass(frozen=True, slots=True)
class Entry:
    """One change, as watches see it."""

    revision: int
    kind: Kind
    old: Object | None
    new: Object | None


@dataclass(slots=True)
class Page:
    """Part of a list."""

    items: list[Object]
    revision: int
    token: str = ""
    remaining: int = 0


@dataclass(slots=True)
class Store:
    """All objects. Thread-safe. `kubelets`: containers end at once when a pod is deleted whose node is not dead."""

    clock: Callable[[], float] = time.time
    schemas: Schemas | None = field(default_factory=Schemas)
    kubelets: bool = True
    dead_nodes: set[str] = field(default_factory=set)
    namespaces_needed: bool = True
    revision: int = 1
    compacted: int = 0
    log: list[Entry] = field(default_factory=list)
    listeners: list[Callable[[], None]] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _objects: dict[str, dict[Key, Object]] = field(default_factory=dict)
    _applied: dict[tuple[str, Key], dict[str, Object]] = field(default_factory=dict)
    _made: int = 0

    def __post_init__(self) -> None:
        for name in ("default", "kube-system"):
            self.seed({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    # --- reading -----------------------------------------------------------------------------------------------

    def get(self, kind: Kind, name: str, namespace: str = "") -> Object:
        with self.lock:
            return clone(self._one(kind, name, namespace))

    def objects(self, kind: Kind) -> list[Object]:
        """All objects of a kind, for assertions."""
        with self.lock:
            return [clone(one) for _, one in sorted(self._of(kind).items())]

    def list(
        self, kind: Kind, namespace: str = "", *, labels: str = "", fields: str = "", limit: int = 0, token: str = ""
    ) -> Page:
        """A page of the list as it was when its first page was read."""
        with self.lock:
            revision, after = self.revision, ("", "")
            if token:
                text, place, name = token.split(":", 2)
                revision, after = int(text), (place, name)
                if revision < self.compacted:
                    raise ApiError(410, "The provided continue parameter is too old", reason="Expired")
            items = sorted(self._as_of(kind, revision).items())
            chosen = [
                (key, one)
                for key, one in items
                if key > after and (not namespace or key[0] == namespace) and _matches(one, labels, fields)
            ]
            page, rest = (chosen[:limit], chosen[limit:]) if limit else (chosen, [])
            here = Page([clone(one) for _, one in page], revision)
            if rest:
                here.token, here.remaining = f"{revision}:{page[-1][0][0]}:{page[-1][0][1]}", len(rest)
            return here

    def changes(
        self, kind: Kind, namespace: str, since: int, *, labels: str = "", fields: str = ""
    ) -> Iterator[tuple[str, Object, int]]:
        """(type, object, revision) of what happened after `since`; an object that leaves the selection is DELETED."""
        with self.lock:
            if since < self.compacted:
                raise ApiError(410, f"too old resource version: {since} ({self.compacted})", reason="Expired")
            entries = [entry for entry in self.log if entry.revision > since and entry.kind.name == kind.name]
        for entry in entries:
            had, has = (
                one is not None
                and (not namespace or one["metadata"].get("namespace") == namespace)
                and _matches(one, labels, fields)
                for one in (entry.old, entry.new)
            )
            if has and entry.new is not None:
                yield ("MODIFIED" if had else "ADDED"), clone(entry.new), entry.revision
            elif had and entry.old is not None:
                gone = clone(entry.new or entry.old)
                gone["metadata"]["resourceVersion"] = str(entry.revision)
                yield "DELETED", gone, entry.revision

    def compact(self) -> None:
        """Forget history: watches and lists from before get 410 Gone."""
        with self.lock:
            self.compacted = self.revision
            self.log.clear()

    # --- writing -----------------------------------------------------------------------------------------------

    def seed(self, document: Object) -> Object:
        """Put an object there as it is, status and all: what controllers and kubelets did before the test."""
        kind = KINDS[document["kind"]]
        with self.lock:
            new = clone(document)
            space = new["metadata"].get("namespace", "default") if kind.namespaced else ""
            key = (space, new["metadata"]["name"])
            self._stamp(kind, new, space)
            return clone(self.put(kind, key, new))

    def create(
        self, kind: Kind, document: Object, namespace: str = "", *, strict: str = "Warn", dry_run: bool = False
    ) -> Object:
        with self.lock:
            new = checks.checked_identity(kind, clone(document), namespace)
            meta = new["metadata"]
            if meta.get("resourceVersion"):
                raise ApiError(400, "resourceVersion should not be set on objects to be created")
            if not meta.get("name") and meta.get("generateName"):
                self._made += 1
                meta["name"] = f"{meta['generateName']}{self._made:05d}"
            checks.check_name(kind, meta.get("name", ""))
            key = (meta.get("namespace", ""), meta["name"])
            if kind.namespaced and self.namespaces_needed and ("", key[0]) not in self._of(NAMESPACE):
                raise checks.missing(NAMESPACE, key[0])
            new = self._admitted(kind, new, strict)
            if key in self._of(kind):
                message = f'{checks.resource(kind)} "{key[1]}" already exists'
                raise ApiError(409, message, reason="AlreadyExists", details=checks.details(kind, key[1]))
            if kind.name in _WITH_STATUS and kind.name not in _STATUS_FROM_CREATE:
                new.pop("status", None)
            if kind.name in ("Pod", "PersistentVolumeClaim"):
                new["status"] = {"phase": "Pending"}
            for name in _SERVER_OWNED:
                meta.pop(name, None)
            new["metadata"] = meta
            self._stamp(kind, new, key[0])
            return clone(new if dry_run else self.put(kind, key, new))

    def replace(
        self,
        kind: Kind,
        name: str,
        document: Object,
        namespace: str = "",
        *,
        sub: str = "",
        strict: str = "Warn",
        dry_run: bool = False,
    ) -> Object:
        """PUT of an object or its status."""
        with self.lock:
            old = self._one(kind, name, namespace)
            new = checks.checked_identity(kind, clone(document), namespace)
            if new["metadata"].get("name", name) != name:
                raise ApiError(400, f"the name of the object ({new['metadata']['name']}) is not {name}")
            return self._change(kind, old, new, sub=sub, strict=strict, dry_run=dry_run)

    def patch(
        self,
        kind: Kind,
        name: str,
        patch: Any,
        namespace: str = "",
        *,
        style: str = "merge",
        sub: str = "",
        strict: str = "Warn",
        dry_run: bool = False,
    ) -> Object:
        """PATCH with style merge, strategic or json."""
        with self.lock:
            old = self._one(kind, name, namespace)
            try:
                if style == "json":
                    new = patches.json_patch(old, patch)
                else:
                    new = patches.merge(clone(old), patch, by_name=style == "strategic")
            except patches.BadPatch as error:
                raise ApiError(422, str(error)) from error
            if style != "json" and "resourceVersion" not in (patch.get("metadata") or {}):
                new["metadata"].pop("resourceVersion", None)
            return self._change(kind, old, new, sub=sub, strict=strict, dry_run=dry_run)

    def apply(
        self,
        kind: Kind,
        name: str,
        document: Object,
        namespace: str = "",
        *,
        manager: str,
        force: bool = False,
        strict: str = "Warn",
        dry_run: bool = False,
    ) -> Object:
        """Server-side apply by a field manager; what it applied before and does not any more is removed."""
        with self.lock:
            key = (namespace if kind.namespaced else "", name)
            owners = self._applied.setdefault((kind.name, key), {})
            old = self._of(kind).get(key)
            if old is None:
                owners.clear()
                made = self.create(kind, document, namespace, strict=strict, dry_run=dry_run)
            else:
                checks.check_owners(kind, name, owners, manager, document, force)
                wanted = checks.checked_identity(kind, clone(document), namespace)
                self._admitted(kind, clone(wanted), strict, complete=False)
                new = patches.apply(clone(old), owners.get(manager, {}), wanted)
                new["metadata"] = {**old["metadata"], **new["metadata"]}
                new["metadata"].pop("resourceVersion", None)
                made = self._change(kind, old, new, strict=strict, dry_run=dry_run)
            if not dry_run:
                owners[manager] = clone(document)
            return made

    def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str = "",
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        grace_seconds: int | None = None,
        propagation: str = "Background",
        dry_run: bool = False,
    ) -> Object:
        """The object as it is now: with deletionTimestamp while something keeps it."""
        with self.lock:
            old = self._one(kind, name, namespace)
            checks.check_preconditions(kind, old, uid, resource_version)
            if dry_run:
                return clone(old)
            key = (old["metadata"].get("namespace", ""), name)
            new = clone(old)
            meta = new["metadata"]
            grace = collector.grace_seconds(kind, old, grace_seconds)
            if "deletionTimestamp" in meta:
                grace = min(grace, int(meta.get("deletionGracePeriodSeconds", 0)))
            meta["deletionTimestamp"] = meta.get("deletionTimestamp") or _stamp(self.clock() + grace)
            meta["deletionGracePeriodSeconds"] = grace
            finalizer = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}.get(propagation)
            if finalizer and finalizer not in meta.get("finalizers", []):
                meta["finalizers"] = [*meta.get("finalizers", []), finalizer]
            if new != old:
                self.put(kind, key, new)
            collector.settle(self)
            return clone(self._of(kind).get(key, new))

    def evict(self, name: str, namespace: str, grace_seconds: int | None = None) -> Object:
        """Eviction of a pod; refused with 429 by a disruption budget that allows no disruption."""
        with self.lock:
            pod = self._one(POD, name, namespace)
            for budget in self._of(KINDS["PodDisruptionBudget"]).values():
                wanted = budget["spec"].get("selector", {}).get("matchLabels") or {}
                chosen = wanted.items() <= (pod["metadata"].get("labels") or {}).items()
                allowed = budget.get("status", {}).get("disruptionsAllowed", 0)
                if budget["metadata"]["namespace"] == namespace and chosen and allowed < 1:
                    raise ApiError(429, "Cannot evict pod as it would violate the pod's disruption budget.")
            return self.delete(POD, name, namespace, grace_seconds=grace_seconds)

    def finish_pods(self, *names: str) -> None:
        """The kubelets are done with these deleted pods, or with all on living nodes."""
        with self.lock:
            for key, pod in list(self._of(POD).items()):
                chosen = key[1] in names or (not names and pod["spec"].get("nodeName") not in self.dead_nodes)
                if chosen and "deletionTimestamp" in pod["metadata"] and pod["metadata"]["deletionGracePeriodSeconds"]:
                    new = clone(pod)
                    new["metadata"]["deletionGracePeriodSeconds"] = 0
                    self.put(POD, key, new)
            collector.settle(self)

    # --- rules -------------------------------------------------------------------------------------------------

    def _change(
        self, kind: Kind, old: Object, new: Object, *, sub: str = "", strict: str = "Warn", dry_run: bool = False
    ) -> Object:
        meta = old["metadata"]
        name = meta["name"]
        version = new["metadata"].get("resourceVersion")
        checks.check_preconditions(kind, old, new["metadata"].get("uid"), version or None)
        if sub == "status":
            new = {**clone(old), "status": new.get("status", {})}
        elif kind.name in _WITH_STATUS or kind.name in _STATUS_FROM_CREATE:
            new = {**new, "status": clone(old["status"])} if "status" in old else {**new}
            if "status" not in old:
                new.pop("status", None)
        new = self._admitted(kind, new, strict)
        kept = {name: meta[name] for name in (*_SERVER_OWNED, "name", "namespace") if name in meta}
        new["metadata"] = {**new["metadata"], **kept, "resourceVersion": meta["resourceVersion"]}
        if kind.name == "Pod":
            checks.check_pod_change(old, new)
        if "deletionTimestamp" in meta and set(new["metadata"].get("finalizers", [])) - set(meta.get("finalizers", [])):
            raise checks.invalid(kind, name, "metadata.finalizers: Forbidden: no new finalizers on a deleted object")
        if new == old:
            return clone(old)
        if new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] = meta.get("generation", 1) + 1
        if dry_run:
            return clone(new)
        key = (meta.get("namespace", ""), name)
        self.put(kind, key, new)
        collector.settle(self)
        return clone(self._of(kind).get(key, new))

    def put(self, kind: Kind, key: Key, new: Object | None) -> Object:
        old = self._of(kind).get(key)
        self.revision += 1
        if new is None:
            del self._of(kind)[key]
        else:
            new = clone(new)
            new["metadata"]["resourceVersion"] = str(self.revision)
            self._of(kind)[key] = new
        self.log.append(Entry(self.revision, kind, old, new))
        for listener in self.listeners:
            listener()
        return new or {}

    def _admitted(self, kind: Kind, document: Object, strict: str, *, complete: bool = True) -> Object:
        """With defaults, without unknown fields. Raises ApiError 400 for unknown ones if strict, 422 for wrong ones."""
        if self.schemas is None:
            return document
        unknown, wrong, admitted = self.schemas.admit(kind, document)
        if unknown and strict == "Strict":
            listed = ", ".join(f'unknown field "{path}"' for path in unknown)
            raise ApiError(
                400, f'{kind.name} in version "{kind.api_version}" cannot be handled: strict decoding error: {listed}'
            )
        if wrong and complete:
            raise checks.invalid(kind, document["metadata"].get("name", ""), *wrong)
        return admitted

    def _one(self, kind: Kind, name: str, namespace: str) -> Object:
        found = self._of(kind).get((namespace if kind.namespaced else "", name))
        if found is None:
            raise checks.missing(kind, name)
        return found

    def _of(self, kind: Kind) -> dict[Key, Object]:
        return self._objects.setdefault(kind.name, {})

    def everything(self) -> Iterator[tuple[Kind, Key, Object]]:
        for name, found in list(self._objects.items()):
            for key, one in list(found.items()):
                yield KINDS[name], key, one

    def _as_of(self, kind: Kind, revision: int) -> dict[Key, Object]:
        found = dict(self._of(kind))
        for entry in reversed(self.log):
            if entry.revision <= revision:
                break
            one = entry.new or entry.old
            if entry.kind.name == kind.name and one is not None:
                key = (one["metadata"].get("namespace", ""), one["metadata"]["name"])
                if entry.old is None:
                    found.pop(key, None)
                else:
                    found[key] = entry.old
        return found

    def _stamp(self, kind: Kind, new: Object, namespace: str) -> None:
        self._made += 1
        meta = new["metadata"]
        new.setdefault("apiVersion", kind.api_version)
        new.setdefault("kind", kind.name)
        if kind.namespaced:
            meta["namespace"] = namespace
        meta.setdefault("uid", str(uuid.UUID(int=self._made)))
        meta.setdefault("creationTimestamp", _stamp(self.clock()))
        meta.setdefault("generation", 1)


def _matches(found: Object, labels: str, fields: str) -> bool:
    try:
        return matches(found, labels, fields)
    except ValueError as error:
        raise ApiError(400, str(error)) from error


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
