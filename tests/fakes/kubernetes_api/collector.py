"""Deletion: graces, finalizers, and the garbage collector that follows owner references."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from argusrl.cluster.kinds import Kind
from fakes.kubernetes_api.patches import clone

if TYPE_CHECKING:
    from fakes.kubernetes_api.store import Store

Object = dict[str, Any]


def settle(store: Store) -> None:
    """Remove what is deleted and kept by nothing, and what its owners left behind, until nothing changes."""
    while _settle_once(store):
        pass


def _settle_once(store: Store) -> bool:
    for kind, key, found in store.everything():
        meta = found["metadata"]
        if "deletionTimestamp" not in meta:
            continue
        kept = [name for name in meta.get("finalizers", []) if not _done(store, name, found)]
        if kept != meta.get("finalizers", []):
            new = clone(found)
            new["metadata"]["finalizers"] = kept
            store.put(kind, key, new)
            return True
        if not kept and not _running(store, kind, found):
            store.put(kind, key, None)
            return True
    return _collect_once(store)


def _running(store: Store, kind: Kind, found: Object) -> bool:
    """Whether a kubelet has yet to end the containers of a deleted pod."""
    if kind.name != "Pod" or not found["metadata"]["deletionGracePeriodSeconds"]:
        return False
    return not store.kubelets or found["spec"].get("nodeName") in store.dead_nodes


def _done(store: Store, finalizer: str, owner: Object) -> bool:
    """Whether the garbage collector has done what its finalizers stand for."""
    if finalizer not in ("foregroundDeletion", "orphan"):
        return False
    uid = owner["metadata"]["uid"]
    owned = [(kind, key, one) for kind, key, one in store.everything() if _reference(one, uid)]
    if finalizer == "orphan":
        for kind, key, one in owned:
            new = clone(one)
            new["metadata"]["ownerReferences"] = [
                reference for reference in one["metadata"]["ownerReferences"] if reference["uid"] != uid
            ]
            store.put(kind, key, new)
        return True
    for kind, _, one in owned:
        if "deletionTimestamp" not in one["metadata"]:
            meta = one["metadata"]
            store.delete(kind, meta["name"], meta.get("namespace", ""), propagation="Foreground")
    return not any((_reference(one, uid) or {}).get("blockOwnerDeletion") for _, _, one in store.everything())


def _collect_once(store: Store) -> bool:
    """Delete one object whose owners are all gone."""
    alive = {one["metadata"]["uid"] for _, _, one in store.everything()}
    for kind, _, one in store.everything():
        meta = one["metadata"]
        owners = meta.get("ownerReferences") or []
        if owners and "deletionTimestamp" not in meta and not any(owner["uid"] in alive for owner in owners):
            store.delete(kind, meta["name"], meta.get("namespace", ""))
            return True
    return False


def grace_seconds(kind: Kind, found: Object, asked: int | None) -> int:
    if kind.name != "Pod":
        return 0
    phase = found.get("status", {}).get("phase")
    if not found.get("spec", {}).get("nodeName") or phase in ("Failed", "Succeeded"):
        return 0
    return int(found["spec"].get("terminationGracePeriodSeconds", 30)) if asked is None else asked


def _reference(found: Object, uid: str) -> Object | None:
    owners = found["metadata"].get("ownerReferences") or []
    return next((owner for owner in owners if owner["uid"] == uid), None)
