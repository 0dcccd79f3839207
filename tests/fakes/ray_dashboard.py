"""The Jobs API of a Ray dashboard, in memory: what Ray 2.60 answers, without Ray."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class RayDashboard:
    """Use as a context manager; `jobs` may be changed at any time."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.fail_status = 0  # every answer, if set
        self.headers: list[dict[str, str]] = []  # of every request
        dashboard = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                dashboard._answer(self, "GET")

            def do_POST(self) -> None:
                dashboard._answer(self, "POST")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> RayDashboard:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def set(self, submission_id: str, status: str, **more: Any) -> None:
        """Put a job there, or change it."""
        job = {
            "type": "SUBMISSION",
            "submission_id": submission_id,
            "entrypoint": "",
            "start_time": 1000.0 * time.time(),
        }
        self.jobs[submission_id] = {**job, **self.jobs.get(submission_id, {}), "status": status, **more}

    def _answer(self, http: BaseHTTPRequestHandler, method: str) -> None:
        self.headers.append({name.lower(): value for name, value in http.headers.items()})
        length = int(http.headers.get("Content-Length") or 0)
        body = json.loads(http.rfile.read(length) or b"null")
        status, value = (self.fail_status, "out of order") if self.fail_status else self._do(method, http.path, body)
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        http.send_response(status)
        http.send_header("Content-Length", str(len(data)))
        http.end_headers()
        http.wfile.write(data)

    def _do(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/api/version":
            return 200, {"version": "4", "ray_version": "2.60.0"}
        parts = path.removeprefix("/api/jobs/").split("/")
        if parts == [""]:
            if method == "GET":
                return 200, [*self.jobs.values(), {"type": "DRIVER", "submission_id": None, "status": "RUNNING"}]
            if body["submission_id"] in self.jobs:
                return 500, f"Traceback …\nValueError: Job with submission_id {body['submission_id']} already exists."
            given = {name: body[name] for name in ("entrypoint", "metadata", "runtime_env")}
            self.set(body["submission_id"], "PENDING", **given)
            return 200, {"job_id": body["submission_id"], "submission_id": body["submission_id"]}
        job = self.jobs.get(parts[0])
        if job is None:
            return 404, f"Job {parts[0]} does not exist"
        if parts[1:] == ["stop"]:
            running = job["status"] in ("PENDING", "RUNNING")
            if running:
                job["status"] = "STOPPED"
            return 200, {"stopped": running}
        if parts[1:] == ["logs"]:
            return 200, {"logs": self.logs.get(parts[0], "")}
        return 200, job
