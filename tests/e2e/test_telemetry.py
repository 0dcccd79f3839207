"""A real Prometheus scrapes a real run: the driver's own port, and Ray's exporter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from argusrl.cluster.local import HEAD_FOLDER
from argusrl.observe.prometheus import SERIES
from argusrl.storage.publish import read_lines
from e2e.started import Started
from prometheus_server import Prometheus, free_port, prometheus, script

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

RUN = 'run="watched", attempt="1"'
EXPORTER_PATIENCE_SECONDS = 60.0  # Ray reports every ten seconds


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Started, Prometheus]]:
    root, port = tmp_path_factory.mktemp("watched"), free_port()
    # Long enough that Ray reports a few times while it runs.
    started = Started(root, "watched", f"observe.prometheus_port={port}", "algorithm.num_steps=8")
    try:
        exporter = _ray_exporter(started)
        jobs = {"driver": [f"127.0.0.1:{port}"], "ray": [exporter]}
        with prometheus(tmp_path_factory.mktemp("prometheus"), jobs) as server:
            yield started, server
    finally:
        started.process.terminate()
        started.end()


def _ray_exporter(started: Started) -> str:
    """host:port of the exporter of the run's node, which Ray writes into the folder of its session."""
    ports: list[int] = []

    def known() -> bool:
        for process in psutil.Process(started.process.pid).children(recursive=True):
            with suppress(psutil.Error, KeyError):
                folder = Path(process.environ()[HEAD_FOLDER])
                ports.extend(int(file.read_text()) for file in folder.glob("ray/session_*/*metrics_export_port*"))
        return bool(ports)

    started.until(known)
    assert ports[0] > 0, "Ray exports no metrics"
    return f"127.0.0.1:{ports[0]}"


def test_the_rows_of_a_run_arrive(watched):
    started, server = watched
    alive = lambda: started.process.poll() is None  # noqa: E731
    (labels, value), *_ = server.until(f'argusrl_reward_mean{{{RUN}, job="driver"}}', 240, alive)
    assert labels.keys() == {"__name__", "job", "instance", "run", "attempt"}
    step = int(server.query(f'argusrl_step{{{RUN}, job="driver"}}')[0][1])
    rewards = {row["step"]: row["reward/mean"] for row in read_lines(started.folder.metrics) if row["step"]}
    assert value in rewards.values()
    assert 1 <= step <= 8
    assert server.query(f'time() - argusrl_heartbeat_timestamp_seconds{{{RUN}, job="driver"}} < 60')
    assert server.query(f'argusrl_trained_tokens_total{{{RUN}, job="driver"}} > 0')
    assert server.query(f'argusrl_goodput_ratio{{{RUN}, job="driver"}} > 0')
    assert server.query(f'argusrl_faults_total{{{RUN}, job="driver"}} == 0')


def test_ray_exports_the_same(watched):
    _, server = watched
    server.until(f"ray_argusrl_reward_mean{{{RUN}}}", EXPORTER_PATIENCE_SECONDS)
    found = server.query(f'{{__name__=~"ray_argusrl_.+", {RUN}}}')
    names = {labels["__name__"].removeprefix("ray_") for labels, _ in found}
    assert "argusrl_heartbeat_timestamp_seconds" in names
    assert names <= {name.replace("<name>", "exact") for name in SERIES}
    assert not [labels for labels, _ in found if any("sha256" in label for label in labels)]


def test_the_dashboard_shows_the_run(watched):
    _, server = watched
    board = script("write_dashboard")
    empty = []
    for expression in board.expressions():
        plain = expression.replace("$__rate_interval", "1m").replace("$run", "watched").replace("$attempt", ".*")
        if "rate(" not in plain and not server.query(plain):
            empty.append(expression)
    of_gpus = {f"ray_{name}" for name in board.NODES if "gpu" in name or "gram" in name}
    assert set(empty) <= of_gpus


def test_the_run_ends_well(watched):
    started, _ = watched
    assert started.end() == 0
