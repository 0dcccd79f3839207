"""The store behind HTTP, as the official client speaks it. aiohttp in a thread of its own.

with ApiServer() as server:
    kube = server.connect()
    server.rules.append(Rule(status=503, times=2))
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web

from argusrl.cluster.kinds import KINDS, POD, Kind
from argusrl.cluster.kube import Kube
from fakes.kubernetes_api.errors import ApiError
from fakes.kubernetes_api.patches import clone
from fakes.kubernetes_api.store import Page, Store

TOKEN = "secret-of-the-test"
_PATH = re.compile(
    r"^/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/[^/]))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?$"
)
_PLACES = {(kind.api_version, kind.plural): kind for kind in KINDS.values()}
_STYLES = {
    "application/merge-patch+json": "merge",
    "application/strategic-merge-patch+json": "strategic",
    "application/json-patch+json": "json",
}
_BOOKMARK_SECONDS = 0.05

Program = Callable[[list[str]], tuple[int, str]]
"""What a container does with a command: exit code and output."""


@dataclass(slots=True)
class Rule:
    """What goes wrong with requests that match. `times` None is for ever."""

    verb: str = ".*"  # get, list, watch, create, update, patch, delete
    resource: str = ".*"  # plural, or plural/subresource
    namespace: str = ".*"
    status: int = 0  # 0: none; 403 denies
    times: int | None = None
    delay_seconds: float = 0.0
    drop: bool = False  # close the connection without an answer
    message: str = "injected"

    def takes(self, verb: str, resource: str, namespace: str) -> bool:
        """Whether it is about this request; counts it."""
        words = ((self.verb, verb), (self.resource, resource), (self.namespace, namespace))
        if self.times == 0 or not all(re.fullmatch(pattern, word) for pattern, word in words):
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass(slots=True)
class Request:
    """One request, taken apart."""

    verb: str
    kind: Kind
    namespace: str
    name: str
    sub: str
    query: dict[str, str]
    body: Any

    @property
    def resource(self) -> str:
        return f"{self.kind.plural}/{self.sub}" if self.sub else self.kind.plural


@dataclass(slots=True)
class ApiServer:
    """Serves `store` at `url` from start to stop. Attributes may be changed at any time."""

    store: Store = field(default_factory=Store)
    rules: list[Rule] = field(default_factory=list)
    logs: dict[tuple[str, str], str] = field(default_factory=dict)  # (pod, container or "") → output
    programs: dict[str, Program] = field(default_factory=dict)  # pod → what exec does
    ports: dict[tuple[str, int], int] = field(default_factory=dict)  # (pod, port) → port of this machine
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # (verb, resource, name) of every request
    clock_skew_seconds: float = 0.0
    git_version: str = "v1.34.2-fake"
    token: str = TOKEN
    url: str = ""
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _wake: asyncio.Event | None = None
    _closing: asyncio.Event | None = None

    def __enter__(self) -> ApiServer:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop is not None
        assert self._closing is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(10)

    def connect(self, namespace: str = "default", *, token: str | None = None, timeout_seconds: float = 5.0) -> Kube:
        """A port on this server through the real client."""
        from kubernetes import client

        settings = client.Configuration()
        settings.host, settings.retries = self.url, False
        settings.api_key = {"BearerToken": f"Bearer {self.token if token is None else token}"}
        return Kube(client.ApiClient(settings), namespace, timeout_seconds)

    def write_kubeconfig(self, path: Path, namespace: str = "default") -> Path:
        """A kubeconfig for this server, for commands."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": namespace}}],
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": self.token}}],
        }
        path.write_text(json.dumps(config))
        return path

    # --- serving -----------------------------------------------------------------------------------------------

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._wake, self._closing = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self.store.listeners.append(self._changed)
        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        started.set()
        await self._closing.wait()
        self.store.listeners.remove(self._changed)
        self._wake.set()
        await runner.cleanup()

    def _changed(self) -> None:
        assert self._loop is not None
        assert self._wake is not None
        self._loop.call_soon_threadsafe(self._wake.set)

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        try:
            return await self._route(http)
        except ApiError as error:
            return web.json_response(error.body(), status=error.status, headers=self._headers())

    async def _route(self, http: web.Request) -> web.StreamResponse:
        if http.headers.get("Authorization", "").lower() != f"bearer {self.token}".lower():
            raise ApiError(401, "Unauthorized")
        if http.path == "/version":
            await self._interfere("get", "version", "")
            return self._json({"gitVersion": self.git_version, "platform": "linux/amd64"})
        request = await self._parse(http)
        self.asked.append((request.verb, request.resource, request.name))
        rule = await self._interfere(request.verb, request.resource, request.namespace)
        if rule is not None and rule.drop:
            assert http.transport is not None
            http.transport.close()
        if request.verb == "watch":
            return await self._watch(http, request)
        if request.sub == "exec":
            return await self._exec(http, request)
        if request.sub == "portforward":
            return await self._forward(http, request)
        if request.sub == "log":
            return await self._log(http, request)
        return self._json(*self._act(request))

    async def _parse(self, http: web.Request) -> Request:
        found = _PATH.match(http.path)
        if found is None:
            raise ApiError(404, "the server could not find the requested resource")
        kind = _PLACES.get((found["core"] or found["group"], found["plural"]))
        if kind is None:
            raise ApiError(404, "the server could not find the requested resource")
        query = dict(http.query)
        body = await http.json() if http.can_read_body else None
        sub = found["sub"] or ""
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}.get(http.method, "get")
        if sub in ("exec", "portforward"):
            verb = "create"  # by its rights, whatever the method
        if verb == "get" and not found["name"]:
            verb = "watch" if query.get("watch") in ("true", "1", "True") else "list"
        if verb == "patch":
            query["content-type"] = http.content_type
        return Request(verb, kind, found["namespace"] or "", found["name"] or "", sub, query, body)

    async def _interfere(self, verb: str, resource: str, namespace: str) -> Rule | None:
        for rule in self.rules:
            if rule.takes(verb, resource, namespace):
                await asyncio.sleep(rule.delay_seconds)
                if rule.status == 403:
                    raise ApiError(
                        403,
                        f'{resource} is forbidden: User "tester" cannot {verb} resource "{resource}" in API group "" '
                        f'in the namespace "{namespace}"',
                    )
                if rule.status:
                    raise ApiError(rule.status, rule.message)
                return rule
        return None

    def _act(self, request: Request) -> tuple[Any, int]:
        kind, name, place, query = request.kind, request.name, request.namespace, request.query
        choice: dict[str, Any] = {
            "strict": query.get("fieldValidation", "Warn"),
            "dry_run": query.get("dryRun") == "All",
        }
        if request.verb == "get":
            return self.store.get(kind, name, place), 200
        if request.verb == "list":
            return self._list(request), 200
        if kind.name == "SelfSubjectAccessReview":
            return self._review(request), 201
        if request.verb == "create":
            return self.store.create(kind, request.body, place, **choice), 201
        if request.verb == "update":
            return self.store.replace(kind, name, request.body, place, sub=request.sub, **choice), 200
        if request.verb == "patch":
            return self._patch(request, choice), 200
        options = request.body or {}
        preconditions = options.get("preconditions") or {}
        grace = options.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
        return self.store.delete(
            kind,
            name,
            place,
            uid=preconditions.get("uid"),
            resource_version=preconditions.get("resourceVersion"),
            grace_seconds=None if grace is None else int(grace),
            propagation=options.get("propagationPolicy") or query.get("propagationPolicy") or "Background",
            dry_run=choice["dry_run"],
        ), 200

    def _patch(self, request: Request, choice: dict[str, Any]) -> Any:
        kind, name, place, style = request.kind, request.name, request.namespace, request.query["content-type"]
        if style == "application/apply-patch+yaml":
            manager = request.query.get("fieldManager")
            if not manager:
                raise ApiError(400, "fieldManager is required for apply patch")
            force = request.query.get("force") == "true"
            return self.store.apply(kind, name, request.body, place, manager=manager, force=force, **choice)
        if style not in _STYLES:
            raise ApiError(415, f"the body of the request was in an unknown format - {style}")
        custom = "." in kind.group and not kind.group.endswith(".k8s.io") and kind.group != "apps"
        if style == "application/strategic-merge-patch+json" and custom:
            raise ApiError(415, f"{style} is not supported by {kind.name}")
        return self.store.patch(kind, name, request.body, place, style=_STYLES[style], sub=request.sub, **choice)

    def _list(self, request: Request) -> Any:
        page: Page = self.store.list(
            request.kind,
            request.namespace,
            labels=request.query.get("labelSelector", ""),
            fields=request.query.get("fieldSelector", ""),
            limit=int(request.query.get("limit") or 0),
            token=request.query.get("continue", ""),
        )
        bare = [
            {part: value for part, value in item.items() if part not in ("apiVersion", "kind")} for item in page.items
        ]
        meta: dict[str, Any] = {"resourceVersion": str(page.revision)}
        if page.token:
            meta |= {"continue": page.token, "remainingItemCount": page.remaining}
        kind = request.kind
        return {"apiVersion": kind.api_version, "kind": f"{kind.name}List", "metadata": meta, "items": bare}

    def _review(self, request: Request) -> Any:
        asked = request.body["spec"]["resourceAttributes"]
        resource = asked["resource"] + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        denied = any(
            rule.status == 403
            and re.fullmatch(rule.verb, asked["verb"])
            and re.fullmatch(rule.resource, resource)
            and re.fullmatch(rule.namespace, asked.get("namespace", ""))
            for rule in self.rules
        )
        return {**clone(request.body), "status": {"allowed": not denied}}

    async def _watch(self, http: web.Request, request: Request) -> web.StreamResponse:
        assert self._loop is not None
        assert self._wake is not None
        assert self._closing is not None
        query, kind = request.query, request.kind
        selectors = {"labels": query.get("labelSelector", ""), "fields": query.get("fieldSelector", "")}
        since = int(query.get("resourceVersion") or self.store.revision)
        end = self._loop.time() + float(query.get("timeoutSeconds", 1800))
        list(self.store.changes(kind, request.namespace, since, **selectors))  # 410 as a status, before the stream
        answer = web.StreamResponse(headers={**self._headers(), "Content-Type": "application/json"})
        await answer.prepare(http)
        told = since
        while not self._closing.is_set():
            self._wake.clear()
            seen = self.store.revision
            try:
                for event, found, revision in self.store.changes(kind, request.namespace, since, **selectors):
                    await _line(answer, {"type": event, "object": found})
                    told = seen = max(seen, revision)
            except ApiError as error:  # compacted under the watch
                await _line(answer, {"type": "ERROR", "object": error.body()})
                break
            since = seen
            left = end - self._loop.time()
            if left <= 0:
                break
            try:
                await asyncio.wait_for(self._wake.wait(), min(left, _BOOKMARK_SECONDS))
            except TimeoutError:
                if query.get("allowWatchBookmarks") == "true" and since > told:
                    await _line(answer, {"type": "BOOKMARK", "object": _bookmark(kind, since)})
                    told = since
        await answer.write_eof()
        return answer

    async def _log(self, http: web.Request, request: Request) -> web.StreamResponse:
        self.store.get(POD, request.name, request.namespace)
        container = request.query.get("container", "")
        text = self.logs.get((request.name, container), self.logs.get((request.name, ""), ""))
        lines = text.splitlines(keepends=True)
        if "tailLines" in request.query:
            lines = lines[max(0, len(lines) - int(request.query["tailLines"])) :]
        return web.Response(text="".join(lines), headers=self._headers())

    async def _exec(self, http: web.Request, request: Request) -> web.StreamResponse:
        self.store.get(POD, request.name, request.namespace)
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(http)
        program = self.programs.get(request.name, lambda command: (0, ""))
        code, output = await asyncio.to_thread(program, http.query.getall("command"))
        await socket.send_bytes(b"\x01" + output.encode())
        status: dict[str, Any] = {"status": "Success"}
        if code:
            cause = {"reason": "ExitCode", "message": str(code)}
            status = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
        await socket.send_bytes(b"\x03" + json.dumps(status).encode())
        await socket.close()
        return socket

    async def _forward(self, http: web.Request, request: Request) -> web.StreamResponse:
        self.store.get(POD, request.name, request.namespace)
        port = int(http.query["ports"])
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(http)
        for channel in (b"\x00", b"\x01"):  # data and errors
            await socket.send_bytes(channel + port.to_bytes(2, "little"))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports[request.name, port])

        async def answer() -> None:
            while piece := await reader.read(1 << 16):
                await socket.send_bytes(b"\x00" + piece)
            await socket.close()

        task = asyncio.create_task(answer())
        async for message in socket:
            writer.write(message.data[1:])
        writer.close()
        await task
        return socket

    def _json(self, value: Any, status: int = 200) -> web.Response:
        return web.json_response(value, status=status, headers=self._headers())

    def _headers(self) -> dict[str, str]:
        from email.utils import formatdate

        return {"Date": formatdate(self.store.clock() + self.clock_skew_seconds, usegmt=True)}


def _bookmark(kind: Kind, revision: int) -> dict[str, Any]:
    meta = {"resourceVersion": str(revision), "creationTimestamp": None}
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": meta}


async def _line(answer: web.StreamResponse, value: Any) -> None:
    await answer.write(json.dumps(value).encode() + b"\n")
