"""A real Prometheus for tests: Debian's, started on a folder and a port of its own."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
_START_SECONDS = 60.0
_CONFIG = """\
global:
  scrape_interval: 1s
  scrape_timeout: 1s
scrape_configs:
{jobs}"""
_JOB = """\
  - job_name: {name}
    static_configs:
      - targets: [{targets}]
"""


def script(name: str) -> ModuleType:
    """A file of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def programs() -> Path:
    """The folder with prometheus and promtool; skips the test where they cannot be had."""
    try:
        folder: Path = script("get_prometheus").prometheus_folder()
    except LookupError as error:
        pytest.skip(f"no Prometheus: {error}")
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Prometheus:
    """Its HTTP API."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer. Raises ValueError with Prometheus's own words about a wrong expression."""
        url = f"{self.address}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from error

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series of an instant query."""
        found = self.get("/api/v1/query", query=expression)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def until(self, expression: str, deadline_seconds: float = 60.0, alive: Callable[[], bool] = lambda: True) -> Any:
        """The answer to a query once it has one."""
        end = time.monotonic() + deadline_seconds
        while not (found := self.query(expression)):
            assert alive(), f"the run ended before {expression} was seen"
            assert time.monotonic() < end, f"{expression} is not there; targets: {self.get('/api/v1/targets')}"
            time.sleep(0.2)
        return found

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def prometheus(folder: Path, jobs: Mapping[str, list[str]]) -> Iterator[Prometheus]:
    """Prometheus scrapes host:port of each job every second; its configuration and data lie in `folder`."""
    binaries, port = programs(), free_port()
    lines = [_JOB.format(name=name, targets=", ".join(map(json.dumps, targets))) for name, targets in jobs.items()]
    configuration = folder / "prometheus.yml"
    configuration.write_text(_CONFIG.format(jobs="".join(lines)))
    subprocess.run([binaries / "promtool", "check", "config", configuration], check=True, capture_output=True)
    words = [
        *(binaries / "prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'tsdb'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        server = Prometheus(port)
        end = time.monotonic() + _START_SECONDS
        while not server.ready():
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            assert time.monotonic() < end, (folder / "prometheus.log").read_text()
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=30)
