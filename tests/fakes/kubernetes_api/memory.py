"""A `KubeApi` on a store, without network or client: for simulations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from argusrl.cluster.kinds import POD, Kind, kind_of
from argusrl.cluster.kube_api import Change, Listing, NotFound, Object, Propagation
from argusrl.cluster.kube_http import error_of
from fakes.kubernetes_api.errors import ApiError
from fakes.kubernetes_api.store import Store

Interceptor = Callable[[str, Kind, str], None]
"""Called before each request with verb, kind and name; raises what the request is to fail with."""


class MemoryKube:
    """Several may share a store. `before` and `after` let a simulation fail requests; an exception of `after` is an
    answer that was lost on its way: the request has been done."""

    def __init__(
        self,
        store: Store,
        namespace: str = "default",
        *,
        before: Interceptor | None = None,
        after: Interceptor | None = None,
    ) -> None:
        self.store = store
        self._namespace = namespace
        self._before, self._after = before, after
        self.output: dict[str, list[str]] = {}  # pod → lines that logs() gives
        self.skew_seconds = 0.0

    @property
    def namespace(self) -> str:
        return self._namespace

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        return self._call("get", kind, name, lambda: self.store.get(kind, name, self._place(kind, namespace)))

    def list(self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "") -> Listing:
        place = self._place(kind, namespace)
        page = self._call("list", kind, "", lambda: self.store.list(kind, place, labels=labels, fields=fields))
        return Listing(page.items, str(page.revision))

    def watch(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "", seconds: float = 300.0
    ) -> Iterator[Change]:
        """Never waits: ends when nothing more has happened."""
        listing = self.list(kind, namespace, labels=labels, fields=fields)
        yield from (Change("added", item) for item in listing.items)
        yield Change("listed")
        since = int(listing.resource_version)
        place = self._place(kind, namespace)
        while changes := list(self.store.changes(kind, place, since, labels=labels, fields=fields)):
            for event, found, revision in changes:
                since = revision
                yield Change({"ADDED": "added", "MODIFIED": "modified", "DELETED": "deleted"}[event], found)

    def create(self, kind: Kind, document: Object, namespace: str | None = None) -> Object:
        place = self._place(kind, namespace if namespace is not None else document["metadata"].get("namespace"))
        name = document["metadata"].get("name", "")
        return self._call("create", kind, name, lambda: self.store.create(kind, document, place, strict="Strict"))

    def apply(self, document: Object, *, dry_run: bool = False) -> Object:
        kind, name = kind_of(document), document["metadata"]["name"]
        place = self._place(kind, document["metadata"].get("namespace"))
        return self._call(
            "patch",
            kind,
            name,
            lambda: self.store.apply(
                kind, name, document, place, manager="argusrl", force=True, strict="Strict", dry_run=dry_run
            ),
        )

    def patch(
        self,
        kind: Kind,
        name: str,
        change: Object,
        namespace: str | None = None,
        *,
        resource_version: str | None = None,
        sub: str = "",
    ) -> Object:
        if resource_version is not None:
            change = {**change, "metadata": {**change.get("metadata", {}), "resourceVersion": resource_version}}
        place = self._place(kind, namespace)
        return self._call(
            "patch", kind, name, lambda: self.store.patch(kind, name, change, place, sub=sub, strict="Strict")
        )

    def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        grace_seconds: int | None = None,
        propagation: Propagation = "Background",
    ) -> bool:
        place = self._place(kind, namespace)

        def act() -> bool:
            self.store.delete(
                kind,
                name,
                place,
                uid=uid,
                resource_version=resource_version,
                grace_seconds=grace_seconds,
                propagation=propagation,
            )
            return True

        try:
            return self._call("delete", kind, name, act)
        except NotFound:
            return False

    def logs(
        self,
        pod: str,
        namespace: str | None = None,
        *,
        container: str = "",
        previous: bool = False,
        tail_lines: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        self.get(POD, pod, namespace)
        lines = self.output.get(pod, [])
        yield from lines if tail_lines is None else lines[len(lines) - min(tail_lines, len(lines)) :]

    def execute(
        self,
        pod: str,
        command: Sequence[str],
        namespace: str | None = None,
        *,
        container: str = "",
        seconds: float = 60.0,
    ) -> tuple[int, str]:
        self.get(POD, pod, namespace)
        return 0, ""

    def version(self) -> str:
        return "v1.34.0-fake"

    def clock_skew_seconds(self) -> float:
        return self.skew_seconds

    def _place(self, kind: Kind, namespace: str | None) -> str:
        return (self._namespace if namespace is None else namespace) if kind.namespaced else ""

    def _call(self, verb: str, kind: Kind, name: str, act: Callable[[], Any]) -> Any:
        if self._before is not None:
            self._before(verb, kind, name)
        try:
            answer = act()
        except ApiError as error:
            raise error_of(error.status, error.body(), f"{verb} {kind.name} {name}") from error
        if self._after is not None:
            self._after(verb, kind, name)
        return answer
