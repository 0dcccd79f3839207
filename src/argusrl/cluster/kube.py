"""The Kubernetes API through the official client: `connect()` gives a `Kube`, which is a `KubeApi`.

Requests have deadlines, reads are tried again while the server is away, writes are not (whoever writes knows what
twice means), and watches go on after timeouts, broken connections and 410 Gone without losing a change of state.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from argusrl.cluster.kinds import POD, Kind, kind_of
from argusrl.cluster.kube_api import (
    Change,
    Expired,
    Listing,
    NotFound,
    Object,
    Propagation,
    Unreachable,
    name_of,
)
from argusrl.cluster.kube_http import BACKOFF_SECONDS, KubeHttp, error_of, lines
from argusrl.errors import ClusterError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

FIELD_MANAGER = "argusrl"
INSTALL_HINT = "pip install 'argusrl[cluster]'"

_PAGE = 500
_WATCH_SECONDS = 240.0  # a server ends watches after five to ten minutes anyway
_WATCH_SLACK_SECONDS = 15.0  # a watch that says nothing for so long after its end is a dead connection


def connect(
    context: str | None = None,
    namespace: str | None = None,
    *,
    kubeconfig: str | None = None,
    timeout_seconds: float = 30.0,
) -> Kube:
    """By the kubeconfig (KUBECONFIG, ~/.kube/config), or in a pod by its service account. Raises ClusterError."""
    try:
        import yaml
        from kubernetes import client, config
    except ImportError as error:
        raise ClusterError("the kubernetes package is missing", INSTALL_HINT) from error

    kubeconfig = kubeconfig or os.environ.get("KUBECONFIG")  # the client reads it once, when it is imported
    settings = client.Configuration()
    default = "default"
    try:
        if kubeconfig is None and context is None and _in_cluster():
            config.load_incluster_config(client_configuration=settings)
            default = _service_account_namespace()
        else:
            with _told_errors() as told:
                config.load_kube_config(config_file=kubeconfig, context=context, client_configuration=settings)
            if told:  # a program that is to give credentials failed: the client would go on without any
                raise config.ConfigException(f"no credentials: {'; '.join(told)}")
            contexts, current = config.list_kube_config_contexts(config_file=kubeconfig)
            chosen = next((one for one in contexts if one["name"] == context), current)
            default = chosen.get("context", {}).get("namespace") or default
    except (config.ConfigException, OSError) as error:
        if context is not None and (there := _contexts(kubeconfig)) and context not in there:
            raise ClusterError(f"the kubeconfig has no context {context}", f"there are: {', '.join(there)}") from error
        raise ClusterError(
            f"no access to a Kubernetes cluster: {error}", "aws eks update-kubeconfig --name CLUSTER, or set KUBECONFIG"
        ) from error
    except (yaml.YAMLError, AttributeError, TypeError, KeyError, ValueError) as error:
        raise ClusterError(
            f"{kubeconfig or '~/.kube/config'} is damaged: {' '.join(str(error).split())}",
            "write it anew: aws eks update-kubeconfig --name CLUSTER",
        ) from error
    settings.retries = False  # tried again here, where it is known what may be
    return Kube(client.ApiClient(settings), namespace or default, timeout_seconds)


def _contexts(kubeconfig: str | None) -> list[str]:
    """Names in the kubeconfig; [] where it cannot be read."""
    from kubernetes import config

    try:
        return [str(one["name"]) for one in config.list_kube_config_contexts(config_file=kubeconfig)[0]]
    except (config.ConfigException, OSError):
        return []


@contextmanager
def _told_errors() -> Iterator[list[str]]:
    """What the client tells its log instead of raising it; kept off the terminal."""
    told: list[str] = []
    handler, root = logging.Handler(logging.ERROR), logging.getLogger()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    root.addHandler(handler)
    try:
        yield told
    finally:
        root.removeHandler(handler)


def _in_cluster() -> bool:
    return "KUBERNETES_SERVICE_HOST" in os.environ and not Path("~/.kube/config").expanduser().exists()


def _service_account_namespace() -> str:
    try:
        return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()
    except OSError:
        return "default"


class Kube:
    """A real API server. Safe for several threads; see `KubeApi` for the methods."""

    def __init__(self, client: ApiClient, namespace: str, timeout_seconds: float = 30.0) -> None:
        self.http = KubeHttp(client, timeout_seconds)
        self._namespace = namespace

    @property
    def namespace(self) -> str:
        return self._namespace

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        return self.http.read(kind.path(self._place(namespace), name))

    def list(self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "") -> Listing:
        items: list[Object] = []
        while True:  # a list that expired between two pages is begun anew
            try:
                for page in self._pages(kind, self._place(namespace), _selectors(labels, fields)):
                    items += page.items
                    version = page.resource_version
            except Expired:
                items = []
                continue
            return Listing(items, version)

    def watch(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "", seconds: float = 300.0
    ) -> Iterator[Change]:
        end = time.monotonic() + seconds
        known: dict[tuple[str, str], Object] = {}
        version, listed = "", False
        while (left := end - time.monotonic()) > 0 or not listed:
            if not version:
                listing = self.list(kind, namespace, labels=labels, fields=fields)
                yield from _differences(known, listing.items)
                version = listing.resource_version
                if not listed:
                    yield Change("listed")
                listed = True
                continue
            begun = time.monotonic()
            try:
                for event in self._events(
                    kind, namespace, _selectors(labels, fields), version, min(left, _WATCH_SECONDS)
                ):
                    found: Object = event["object"]
                    version = found["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield _take(known, event["type"], found)
            except Expired:
                version = ""
            except Unreachable:
                if end - time.monotonic() <= BACKOFF_SECONDS:
                    raise
                self.http.read("/version")  # which waits for the server
            if time.monotonic() - begun < BACKOFF_SECONDS < end - time.monotonic():
                time.sleep(BACKOFF_SECONDS)  # a server that ends watches at once must not be flooded

    def create(self, kind: Kind, document: Object, namespace: str | None = None) -> Object:
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        place = self._place(namespace if namespace is not None else document["metadata"].get("namespace"))
        return self.http.json(
            "POST", kind.path(place), query, {"apiVersion": kind.api_version, "kind": kind.name, **document}
        )

    def apply(self, document: Object, *, dry_run: bool = False) -> Object:
        kind = kind_of(document)
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", "force": "true"}
        if dry_run:
            query["dryRun"] = "All"
        path = kind.path(self._place(document["metadata"].get("namespace")), name_of(document))
        return self.http.json("PATCH", path, query, document, content="application/apply-patch+yaml")

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
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        path = kind.path(self._place(namespace), name, sub)
        return self.http.json("PATCH", path, query, change, content="application/merge-patch+json")

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
        preconditions = _without_none({"uid": uid, "resourceVersion": resource_version})
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation,
            **_without_none({"gracePeriodSeconds": grace_seconds, "preconditions": preconditions or None}),
        }
        try:
            self.http.json("DELETE", kind.path(self._place(namespace), name), {}, options)
        except NotFound:
            return False
        return True

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
        query = _without_none(
            {
                "container": container or None,
                "previous": "true" if previous else None,
                "follow": "true" if follow else None,
                "tailLines": None if tail_lines is None else str(tail_lines),
            }
        )
        patience = None if follow else self.http.timeout_seconds  # nothing may be written for hours
        response = self.http.send("GET", POD.path(self._place(namespace), pod, "log"), query, read_seconds=patience)
        with closing(response):
            for line in lines(response):
                yield line.decode(errors="replace")

    def execute(
        self,
        pod: str,
        command: Sequence[str],
        namespace: str | None = None,
        *,
        container: str = "",
        seconds: float = 60.0,
    ) -> tuple[int, str]:
        from argusrl.cluster.kube_exec import execute

        return execute(self.http.client, pod, self._place(namespace), command, container, seconds)

    def forward(self, pod: str, port: int, namespace: str | None = None) -> AbstractContextManager[str]:
        """Within the context, the port of a pod is at the `127.0.0.1:N` that it gives. Raises ClusterError."""
        from argusrl.cluster.port_forward import forwarded

        return forwarded(self.http.client, pod, self._place(namespace), port)

    def version(self) -> str:
        return str(self.http.read("/version")["gitVersion"])

    def clock_skew_seconds(self) -> float:
        response = self.http.send("GET", "/version", {})
        with closing(response):
            response.read()
            return parsedate_to_datetime(response.headers["Date"]).timestamp() + 0.5 - time.time()

    def _place(self, namespace: str | None) -> str:
        return self._namespace if namespace is None else namespace

    def _pages(self, kind: Kind, namespace: str, selectors: Mapping[str, str]) -> Iterator[Listing]:
        query = {**selectors, "limit": str(_PAGE)}
        while True:
            answer = self.http.read(kind.path(namespace), query)
            items = [{"apiVersion": kind.api_version, "kind": kind.name, **item} for item in answer["items"]]
            yield Listing(items, answer["metadata"]["resourceVersion"])
            token = answer["metadata"].get("continue")
            if not token:
                return
            query["continue"] = token

    def _events(
        self, kind: Kind, namespace: str | None, selectors: Mapping[str, str], version: str, seconds: float
    ) -> Iterator[Object]:
        query = {
            **selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(seconds))),
        }
        path = kind.path(self._place(namespace))
        response = self.http.send("GET", path, query, read_seconds=seconds + _WATCH_SLACK_SECONDS)
        with closing(response):
            for line in lines(response):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise error_of(int(event["object"].get("code", 500)), event["object"], f"watch {path}")
                yield event


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return _without_none({"labelSelector": labels or None, "fieldSelector": fields or None})


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _key(found: Object) -> tuple[str, str]:
    return found["metadata"].get("namespace", ""), name_of(found)


def _take(known: dict[tuple[str, str], Object], event: str, found: Object) -> Change:
    if event == "DELETED":
        known.pop(_key(found), None)
        return Change("deleted", found)
    new = _key(found) not in known
    known[_key(found)] = found
    return Change("added" if new else "modified", found)


def _differences(known: dict[tuple[str, str], Object], items: list[Object]) -> Iterator[Change]:
    """Bring `known` up to a list, saying what changed."""
    here = {_key(item): item for item in items}
    for key in [key for key in known if key not in here or _uid(here[key]) != _uid(known[key])]:
        yield Change("deleted", known.pop(key))
    for key, item in here.items():
        old = known.get(key)
        if old is None or old["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
            yield _take(known, "MODIFIED", item)


def _uid(found: Object) -> str:
    return str(found["metadata"].get("uid", ""))
