"""A real HTTP reward service on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[int, dict[str, Any]], tuple[int, Any]]


class Service:
    """A real local server. `answer` turns (number of the request, body) into (status, JSON or text)."""

    def __init__(self, port: int = 0) -> None:
        self.answer: Answer = lambda _, body: (200, {"rewards": [len(i["reply"]) for i in body["items"]]})
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(service.bodies)
                    service.bodies.append(body)
                    service.authorizations.append(self.headers["Authorization"])
                status, answer = service.answer(number, body)
                data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/score"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
