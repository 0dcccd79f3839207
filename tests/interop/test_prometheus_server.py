"""What a real Prometheus makes of our series, and of the dashboard's expressions; no run is needed for that."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from collections.abc import Iterator

import pytest

from argusrl.observe.metrics import METRICS
from argusrl.observe.prometheus import SERIES, PrometheusPort, Telemetry
from prometheus_server import Prometheus, free_port, programs, prometheus, script


@pytest.fixture(scope="module")
def exporter() -> Iterator[PrometheusPort]:
    """Everything that is declared has a value here."""
    telemetry = Telemetry("demo", 1, planned_steps=3, began=time.time() - 60)
    numbers = [metric.name.replace("<name>", "exact") for metric in METRICS.values() if not metric.text]
    telemetry.write({**dict.fromkeys(numbers, 0.5), "step": 2, "reward/mean": 0.75})
    telemetry.phase("rollout")
    telemetry.beat(time.time())
    port = PrometheusPort(telemetry, free_port())
    yield port
    port.close()


@pytest.fixture(scope="module")
def server(exporter: PrometheusPort, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with prometheus(tmp_path_factory.mktemp("prometheus"), {"run": [f"127.0.0.1:{exporter.port}"]}) as started:
        started.until("argusrl_step")
        yield started


def test_every_series_arrives_with_run_and_attempt_alone(server):
    found = server.query('{__name__=~"argusrl_.+"}')
    names = {labels["__name__"] for labels, _ in found}
    assert names == {name.replace("<name>", "exact") for name in SERIES}
    assert all(labels.keys() == {"__name__", "job", "instance", "run", "attempt"} for labels, _ in found)
    assert server.query('argusrl_reward_mean{run="demo", attempt="1"}')[0][1] == 0.75


def test_prometheus_parses_every_expression_of_the_dashboard_and_finds_its_series(server):
    board = script("write_dashboard")
    empty = []
    for expression in board.expressions():
        plain = expression.replace("$__rate_interval", "1m").replace("$run", ".*").replace("$attempt", ".*")
        if not server.query(plain) and "rate(" not in plain:
            empty.append(expression)
    assert empty == [f"ray_{name}" for name in board.NODES], "of Ray's own there is nothing to see here"


def test_a_wrong_expression_would_be_told(server):
    with pytest.raises(ValueError, match="parse error"):
        server.query("max by (run ({argusrl_step})")


def test_promtool_finds_nothing_to_complain_about(exporter):
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as answer:
        text = answer.read()
    done = subprocess.run(
        [programs() / "promtool", "check", "metrics"], input=text, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
