from __future__ import annotations

import ast
import re
import socket
import time
import urllib.request
from pathlib import Path

import pytest

import argusrl.training
from argusrl.config.sections import Config
from argusrl.observe.events import EventLog
from argusrl.observe.metrics import METRICS
from argusrl.observe.prometheus import PHASES, SERIES, PrometheusPort, Telemetry, exported_name, series_of
from argusrl.observe.sinks import open_sinks
from argusrl.storage.layout import RunFolder

VALUES = {"model": {"path": "m"}, "data": {}, "rewards": [{"kind": "exact"}]}


def telemetry(**settings) -> Telemetry:
    return Telemetry("demo", 2, **{"planned_steps": 10, **settings})


def values(of: Telemetry) -> dict[str, float]:
    return {sample.series.name: sample.value for sample in of.samples()}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


@pytest.mark.parametrize(
    ("name", "unit", "expected"),
    [
        ("reward/mean", "reward", "argusrl_reward_mean"),
        ("time/step_seconds", "s", "argusrl_time_step_seconds"),
        ("memory/driver_bytes", "bytes", "argusrl_memory_driver_bytes"),
        ("rollout/truncated_share", "share", "argusrl_rollout_truncated_share"),
        ("evaluate/greedy/accuracy", "share", "argusrl_evaluate_greedy_accuracy_ratio"),
        ("policy/entropy", "nat", "argusrl_policy_entropy_nats"),
        ("rollout/tokens_per_second", "tokens/s", "argusrl_rollout_tokens_per_second"),
    ],
)
def test_names_carry_their_unit(name, unit, expected):
    assert exported_name(name, unit) == expected


def test_every_declared_number_is_exported_under_a_valid_name_of_its_own_and_no_digest_is():
    numbers = [metric for metric in METRICS.values() if not metric.text]
    names = [exported_name(metric.name, metric.unit) for metric in numbers]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"argusrl_[a-z0-9_]+", name.replace("<name>", "x")) for name in SERIES)
    assert set(names) <= set(SERIES)
    assert series_of("adapter/sha256") is None
    assert not any("sha256" in name for name in SERIES)


def test_each_reward_is_a_series():
    assert series_of("reward/exact match/mean").name == "argusrl_reward_exact_match_mean"
    told = telemetry()
    told.write({"step": 1, "reward/a b/mean": 0.25, "reward/a_b/mean": 0.75})
    told.write({"step": 2, "reward/a_b/mean": 1.0, "reward/a b/mean": 0.5})
    assert values(told)["argusrl_reward_a_b_mean"] == 0.5, "two rewards may not take turns under one name"


def test_the_newest_row_counts_and_what_it_lacks_stays():
    told = telemetry()
    told.write({"step": 1, "reward/mean": 0.25, "evaluate/greedy/accuracy": 0.5, "adapter/sha256": "ab"})
    told.write({"step": 2, "reward/mean": 0.75, "policy/loss": None})
    found = values(told)
    assert (found["argusrl_step"], found["argusrl_reward_mean"]) == (2, 0.75)
    assert found["argusrl_evaluate_greedy_accuracy_ratio"] == 0.5
    assert "argusrl_policy_loss" not in found


def test_tokens_and_faults_go_on_counting_over_attempts():
    row = {"rollout/response_tokens_mean": 2.5, "rollout/trajectories": 4, "policy/trained_tokens": 30}
    told = telemetry()
    told.history([{"step": 1, **row}], [{"kind": "fault"}, {"kind": "healed"}, {"kind": "resumed"}])
    told.write({"step": 2, **row})
    told.heard("fault")
    found = values(told)
    assert found["argusrl_sampled_tokens_total"] == 20
    assert found["argusrl_trained_tokens_total"] == 60
    assert (found["argusrl_faults_total"], found["argusrl_recoveries_total"]) == (2, 1)


def test_goodput_is_of_this_attempt():
    told = telemetry(began=time.time() - 100)
    useful = {"time/rollout_seconds": 20.0, "time/train_seconds": 4.0, "time/sync_seconds": 1.0}
    told.history([{"step": 1, **useful}], [])
    told.write({"step": 2, **useful})
    assert values(told)["argusrl_goodput_ratio"] == pytest.approx(0.25, rel=0.05)


def test_an_event_log_tells_of_what_it_wrote(tmp_path):
    told = telemetry()
    EventLog(tmp_path / "events.jsonl", heard=told.heard).write("fault", "engine 0 died")
    assert values(told)["argusrl_faults_total"] == 1


def test_every_phase_of_the_code_has_a_number():
    used = set()
    for path in Path(argusrl.training.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "phase"
            if called and ast.unparse(node.func.value) in ("run", "self", "self.run"):
                used |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    assert used
    assert used <= set(PHASES)
    told = telemetry()
    told.phase("train")
    assert values(told)["argusrl_phase"] == PHASES.index("train")


def test_a_port_serves_them_with_run_and_attempt(tmp_path):
    told = telemetry()
    port = PrometheusPort(told, free_port())
    try:
        told.write({"step": 3, "reward/mean": 0.5, "policy/loss": float("nan")})
        told.beat(1234.5)
        text = scrape(port.port)
    finally:
        port.close()
    assert 'argusrl_reward_mean{attempt="2",run="demo"} 0.5' in text
    assert 'argusrl_policy_loss{attempt="2",run="demo"} NaN' in text
    assert 'argusrl_heartbeat_timestamp_seconds{attempt="2",run="demo"} 1234.5' in text
    assert "# TYPE argusrl_faults_total counter" in text
    assert "# HELP argusrl_reward_mean mean weighted reward of the step's trajectories" in text
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("", port.port))


def test_a_taken_port_hurts_nothing(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        config = Config.model_validate({**VALUES, "observe": {"prometheus_port": taken.getsockname()[1]}})
        reports = []
        told = telemetry()
        config = config.model_copy(update={"observe": config.observe.model_copy(update={"tensorboard": False})})
        sinks = open_sinks(config, RunFolder(tmp_path), [], lambda *report: reports.append(report), told)
        sinks.write({"step": 1, "reward/mean": 0.5})
        sinks.close()
    assert [kind for kind, _ in reports] == ["sink_failed"]
    assert str(taken) not in reports[0][1]
    assert values(told)["argusrl_reward_mean"] == 0.5
