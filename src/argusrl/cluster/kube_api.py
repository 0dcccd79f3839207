"""What argusrl asks of the Kubernetes API: the port `KubeApi`, what goes through it, and how it fails.

Objects are plain dictionaries as the API server sends them. `kube.py` speaks to a real server; tests put an in-memory
one in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from argusrl.cluster.kinds import Kind
from argusrl.errors import ClusterError

Object: TypeAlias = dict[str, Any]
"""A Kubernetes object: apiVersion, kind, metadata, spec, status."""
Propagation: TypeAlias = Literal["Background", "Foreground", "Orphan"]


class KubeError(ClusterError):
    """The API server refused or failed a request. `status` is the HTTP status, 0 where there was no answer."""

    status = 0


class Unreachable(KubeError):
    """No answer: network, name, certificate, deadline, or a server that is overloaded or failing (429, 5xx)."""


class Denied(KubeError):
    """401 or 403: not known, or not allowed to."""

    status = 403


class NotFound(KubeError):
    """404: no such object, or no such kind of objects (CRD not installed)."""

    status = 404


class Conflict(KubeError):
    """409: the object exists already, has changed since it was read, or is another one of the same name."""

    status = 409

    @property
    def exists(self) -> bool:
        """Whether it is about creating what is there already."""
        return "already exists" in self.message


class Refused(KubeError):
    """400 or 422: the object is wrong; the message lists the fields."""

    status = 422


class Expired(KubeError):
    """410: the resource version is too old to go on from. `watch` lists anew by itself."""

    status = 410


@dataclass(frozen=True, slots=True)
class Listing:
    """A list, and the resource version it is of."""

    items: list[Object]
    resource_version: str


@dataclass(frozen=True, slots=True)
class Change:
    """What a watch says. `listed` comes once after all that was there at the beginning; its object is empty."""

    kind: Literal["added", "modified", "deleted", "listed"]
    object: Object = field(default_factory=dict)


class KubeApi(Protocol):
    """A Kubernetes API server. `namespace` None is the default one of the caller, "" is all of them.

    Every method raises KubeError: Unreachable after its deadline, Denied, NotFound, and what else it names.
    """

    @property
    def namespace(self) -> str:
        """The namespace that None stands for."""
        ...

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        """One object."""
        ...

    def list(self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "") -> Listing:
        """All objects that the selectors ("key=value,…") choose."""
        ...

    def watch(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = "", seconds: float = 300.0
    ) -> Iterator[Change]:
        """What is there, `listed`, then every change until `seconds` have passed."""
        ...

    def create(self, kind: Kind, document: Object, namespace: str | None = None) -> Object:
        """Create; the object as stored. Raises Conflict (`exists`), Refused."""
        ...

    def apply(self, document: Object, *, dry_run: bool = False) -> Object:
        """Make the fields of a manifest document so, whether its object exists or not. Raises Refused."""
        ...

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
        """JSON merge patch (null removes); the object as stored. Raises Conflict where it is of another version."""
        ...

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
        """Ask for deletion; False if there was nothing. Raises Conflict where uid or resource version differ."""
        ...

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
        """Lines of a container's output."""
        ...

    def execute(
        self,
        pod: str,
        command: Sequence[str],
        namespace: str | None = None,
        *,
        container: str = "",
        seconds: float = 60.0,
    ) -> tuple[int, str]:
        """Run a command in a container: exit code, and what it wrote to standard output and standard error."""
        ...

    def version(self) -> str:
        """Version of the server: "v1.34.2-eks-…"."""
        ...

    def clock_skew_seconds(self) -> float:
        """Clock of the server less the one of this machine, known to a second."""
        ...


def name_of(document: Object) -> str:
    """metadata.name."""
    return str(document["metadata"]["name"])


def labels_of(document: Object) -> dict[str, str]:
    """metadata.labels, which may be absent."""
    return document.get("metadata", {}).get("labels") or {}


def annotations_of(document: Object) -> dict[str, str]:
    """metadata.annotations, which may be absent."""
    return document.get("metadata", {}).get("annotations") or {}


def conditions_of(document: Object) -> dict[str, Object]:
    """status.conditions by their type."""
    return {condition["type"]: condition for condition in document.get("status", {}).get("conditions") or []}
