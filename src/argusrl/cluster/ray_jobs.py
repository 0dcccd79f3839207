"""The Ray Jobs API of a Ray cluster that runs already, by its REST interface and without Ray.

Addresses: http(s)://host:8265 of a dashboard, or `module://…` where a Python module knows how to get there, as Ray's
own client does it: `sagemaker_ray://cluster/namespace` with AWS's toolkit-for-ray-on-sagemaker-ai.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from argusrl.cluster.kube_api import Object, name_of
from argusrl.errors import ClusterError, ConfigError

DASHBOARD_PORT = 8265
ENDED = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"[\w.:-]+")
_ADDRESS_HINT = f"http://HOST:{DASHBOARD_PORT}, or sagemaker_ray://CLUSTER/NAMESPACE"
_TOOLKIT = {"sagemaker_ray": "pip install toolkit-for-ray-on-sagemaker-ai"}


@dataclass(frozen=True, slots=True)
class RayJobView:
    """One job as the dashboard shows it."""

    submission_id: str
    status: str  # PENDING | RUNNING | STOPPED | SUCCEEDED | FAILED
    message: str = ""
    error_type: str = ""
    started: float = 0.0  # seconds since 1970
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.status in ENDED


class RayJobs:
    """The jobs of one Ray cluster. Every call has a deadline and raises ClusterError."""

    def __init__(self, address: str, timeout_seconds: float = 30.0) -> None:
        """Does not connect yet, except for `module://` addresses, which ask their cloud for the way."""
        self.address = address
        self._url, self._cookies, self._headers = _way(address)
        self._timeout_seconds = timeout_seconds
        self._client = httpx.Client(
            base_url=self._url,
            cookies=self._cookies,
            headers=self._headers,
            timeout=httpx.Timeout(timeout_seconds, connect=10.0),
            follow_redirects=True,
        )

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def version(self) -> str:
        """Version of Ray in the cluster."""
        return str(self._ask("GET", "/api/version").json()["ray_version"])

    def submit(
        self,
        submission_id: str,
        entrypoint: str,
        runtime_env: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> bool:
        """Submit a job; False where the id is taken, so that submitting twice does nothing."""
        if self.get(submission_id) is not None:
            return False
        body = {
            "entrypoint": entrypoint,
            "submission_id": submission_id,
            "runtime_env": dict(runtime_env or {}),
            "metadata": dict(metadata or {}),
        }
        answer = self._send("POST", "/api/jobs/", body)
        if answer.is_error and self.get(submission_id) is not None:  # somebody else was faster
            return False
        self._require(answer, f"submit {submission_id}")
        return True

    def get(self, submission_id: str) -> RayJobView | None:
        """One job; None where there is none of this id."""
        answer = self._send("GET", f"/api/jobs/{quote(submission_id, safe='')}")
        if answer.status_code == 404:
            return None
        self._require(answer, f"job {submission_id}")
        return _view(answer.json())

    def status(self, submission_id: str) -> str | None:
        """Status of one job; None where there is none of this id."""
        found = self.get(submission_id)
        return None if found is None else found.status

    def list(self) -> list[RayJobView]:
        """Jobs that came through this API, newest first."""
        jobs = [_view(job) for job in self._ask("GET", "/api/jobs/").json() if job.get("submission_id")]
        return sorted(jobs, key=lambda job: -job.started)

    def logs(self, submission_id: str) -> str:
        """What the job's driver wrote so far."""
        return str(self._ask("GET", f"/api/jobs/{quote(submission_id, safe='')}/logs").json().get("logs") or "")

    def follow(self, submission_id: str) -> Iterator[str]:
        """What it writes, in pieces, until it ends."""
        loop = asyncio.new_event_loop()
        pieces = self._tail(submission_id)
        try:
            while True:
                try:
                    yield loop.run_until_complete(anext(pieces))
                except StopAsyncIteration:
                    return
        finally:
            loop.run_until_complete(pieces.aclose())
            loop.close()

    def stop(self, submission_id: str) -> bool:
        """Ask a job to end; False where it did not run."""
        answer = self._send("POST", f"/api/jobs/{quote(submission_id, safe='')}/stop")
        if answer.status_code == 404:
            return False
        self._require(answer, f"stop {submission_id}")
        return bool(answer.json().get("stopped"))

    async def _tail(self, submission_id: str) -> Any:
        import aiohttp

        url = f"{self._url}/api/jobs/{quote(submission_id, safe='')}/logs/tail"
        try:
            async with (
                aiohttp.ClientSession(cookies=self._cookies, headers=self._headers) as session,
                session.ws_connect(url, heartbeat=self._timeout_seconds) as socket,
            ):
                async for message in socket:
                    yield message.data
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error

    def _ask(self, method: str, path: str) -> httpx.Response:
        answer = self._send(method, path)
        self._require(answer, path)
        return answer

    def _send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            return self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> ClusterError:
        return ClusterError(
            f"Ray's dashboard at {self._url} does not answer: {error or type(error).__name__}",
            "is the head up, and the address right? From outside of the cluster: kubectl port-forward "
            f"svc/CLUSTER-head-svc {DASHBOARD_PORT}:{DASHBOARD_PORT}, or --cluster CLUSTER",
        )

    def _require(self, answer: httpx.Response, what: str) -> None:
        if not answer.is_error:
            return
        if answer.status_code in (401, 403):
            raise ClusterError(
                f"Ray's dashboard at {self._url} does not let you in (HTTP {answer.status_code})",
                "a Ray cluster that asks for a token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH; Studio's sessions end "
                "after six hours: log in again",
            )
        lines = answer.text.strip().splitlines() or [""]
        raise ClusterError(f"{what}: Ray answers HTTP {answer.status_code}: {lines[-1][:500]}")


def head_address(cluster: Object) -> str:
    """Dashboard of a RayCluster as pods of its Kubernetes cluster reach it."""
    namespace = cluster["metadata"].get("namespace", "default")
    service = ((cluster.get("status") or {}).get("head") or {}).get("serviceName") or f"{name_of(cluster)}-head-svc"
    return f"http://{service}.{namespace}.svc:{DASHBOARD_PORT}"


def _view(job: Mapping[str, Any]) -> RayJobView:
    return RayJobView(
        submission_id=str(job["submission_id"]),
        status=str(job["status"]),
        message=str(job.get("message") or ""),
        error_type=str(job.get("error_type") or ""),
        started=(job.get("start_time") or 0) / 1000,
        metadata=job.get("metadata") or {},
    )


def _way(address: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """URL, cookies and headers for an address. Raises ClusterError, ConfigError."""
    scheme, separator, inner = address.partition("://")
    if not separator:
        scheme, inner = "http", address
    if scheme == "ray":
        raise ClusterError(
            f"{address} is a Ray Client address", f"jobs go to the dashboard: http://HOST:{DASHBOARD_PORT}"
        )
    if scheme in ("http", "https"):
        token = _token(_host(address, inner))
        return f"{scheme}://{inner.rstrip('/')}", {}, {"Authorization": f"Bearer {token}"} if token else {}
    try:
        module = importlib.import_module(scheme)
    except ImportError as error:
        raise ClusterError(
            f"{address}: the Python module {scheme} is not installed",
            _TOOLKIT.get(scheme, f"http://HOST:{DASHBOARD_PORT} needs no module"),
        ) from error
    try:
        found = module.get_job_submission_client_cluster_info(inner)
    except Exception as error:  # whatever a cloud's module raises
        raise ClusterError(
            f"{address}: {error}", "does the cluster have a dashboard endpoint, and you access?"
        ) from error
    return found.address.rstrip("/"), dict(found.cookies or {}), dict(found.headers or {})


def _host(address: str, inner: str) -> str:
    """Raises ConfigError for what is no URL."""
    try:
        host = httpx.URL(f"http://{inner}").host
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"{address!r} is no address: {error}", _ADDRESS_HINT) from error
    if not _HOST.fullmatch(host):
        raise ConfigError(f"{address!r} is no address: it names no host", _ADDRESS_HINT)
    return host


def _token(host: str) -> str:
    """What Ray's own client would send: of the environment, and for a head on this machine of the user's file."""
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return ""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if path is None and host not in _THIS_MACHINE:  # a file that Ray made by itself is for no other machine
        return ""
    try:
        return Path(path or "~/.ray/auth_token").expanduser().read_text().strip()
    except OSError as error:
        if path is None:
            return ""
        raise ClusterError(f"RAY_AUTH_TOKEN_PATH {path} cannot be read: {error.strerror}") from error
