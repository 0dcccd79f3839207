"""Requests to the API server through the official client: deadlines, what is tried again, what errors mean."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from argusrl.cluster.kube_api import (
    Conflict,
    Denied,
    Expired,
    KubeError,
    NotFound,
    Object,
    Refused,
    Unreachable,
)

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

BACKOFF_SECONDS = 0.25  # doubles
_READ_TRIES = 4
_LONGEST_BACKOFF_SECONDS = 10.0
_CONNECT_SECONDS = 10.0
_BUSY = frozenset({429, 500, 502, 503, 504})


class KubeHttp:
    """One API server. Every method raises KubeError."""

    def __init__(self, client: ApiClient, timeout_seconds: float) -> None:
        self.client = client
        self.timeout_seconds = timeout_seconds

    @property
    def host(self) -> str:
        """URL of the API server."""
        return str(self.client.configuration.host)

    def read(self, path: str, query: Mapping[str, str] | None = None) -> Object:
        """GET, tried again while the server is away."""
        wait = BACKOFF_SECONDS
        for tries_left in reversed(range(_READ_TRIES)):
            try:
                return self.json("GET", path, query or {})
            except Unreachable:
                if tries_left == 0:
                    raise
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_BACKOFF_SECONDS)
        raise AssertionError("the last try returns or raises")

    def json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None = None,
        content: str = "application/json",
    ) -> Object:
        response = self.send(method, path, query, body, content)
        with closing(response):
            answer: Object = json.loads(response.read() or b"{}")
            return answer

    def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None = None,
        content: str = "application/json",
        read_seconds: float | None = -1.0,
    ) -> Any:
        """The open response of a request that succeeded."""
        import urllib3
        from kubernetes.client import ApiException

        headers = {"Accept": "application/json", "Content-Type": content}
        read = self.timeout_seconds if read_seconds == -1.0 else read_seconds
        what = f"{method} {path}"
        try:
            request = self.client.param_serialize(
                method,
                path,
                query_params=[*query.items()],
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            response = self.client.call_api(*request, _request_timeout=(_CONNECT_SECONDS, read)).response
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as error:
            raise Unreachable(
                f"{self.host} does not answer {what}: {error}",
                "check the network (VPN, security groups), and the server in: kubectl config view --minify",
            ) from error
        if 200 <= response.status < 300:
            return response
        with closing(response):
            raise error_of(response.status, _status_object(response.read()), what)


def lines(response: Any) -> Iterator[bytes]:
    """Lines as they come. Raises Unreachable where the connection breaks."""
    import urllib3

    rest = b""
    try:
        for part in response.stream(amt=None, decode_content=True):
            *lines, rest = (rest + part).split(b"\n")
            yield from filter(None, lines)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise Unreachable(f"the connection to the API server broke: {error}") from error
    if rest:
        yield rest


def _status_object(body: bytes) -> Object:
    try:
        found = json.loads(body)
    except ValueError:
        return {"message": body.decode(errors="replace")[:500].strip()}
    return found if isinstance(found, dict) else {}


def error_of(status: int, answer: Object, what: str) -> KubeError:
    message = str(answer.get("message") or f"HTTP status {status}")
    if status == 401:
        unknown = Denied(
            f"the API server does not accept your credentials ({what}: {message})",
            "log in again: aws sts get-caller-identity, then aws eks update-kubeconfig --name CLUSTER",
        )
        unknown.status = status
        return unknown
    if status == 403:
        return Denied(
            message,
            "ask an administrator for this right (a Role and RoleBinding, or an EKS access entry with the HyperPod "
            "training policy); argusrl cluster doctor lists every right that is missing",
        )
    if status == 404:
        missing_kind = not (answer.get("details") or {}).get("name")
        hint = "is KubeRay installed, and the namespace right? argusrl cluster doctor" if missing_kind else ""
        return NotFound(message, hint)
    if status == 409:
        return Conflict(message, "somebody else changed it meanwhile: look again, then repeat")
    if status == 410:
        return Expired(message)
    if status in (400, 422):
        return Refused(message, "argusrl cluster manifest RECIPE --validate shows the same without a cluster")
    if status in _BUSY:
        return Unreachable(f"the API server failed {what}: {message}", "try again in a minute")
    error = KubeError(f"{what}: {message}")
    error.status = status
    return error
