"""The run's telemetry on its way to Ray's exporters."""

from __future__ import annotations

import logging
import threading

import pytest
from ray.util import metrics

from argusrl.config.sections import Config
from argusrl.observe.events import EventLog
from argusrl.observe.prometheus import Telemetry
from argusrl.storage.layout import RunFolder
from argusrl.training import telemetry as module
from argusrl.training.telemetry import RayMetrics, telemetry_of

VALUES = {"model": {"path": "m"}, "data": {}, "rewards": [{"kind": "exact"}], "algorithm": {"num_steps": 7}}


class FakeGauge:
    """What Ray is told, by name."""

    values: dict[str, list[float]]
    told: threading.Event

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self.name, self.tag_keys = name, tag_keys

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self.tag_keys == ("run", "attempt")
        type(self).values.setdefault(self.name, []).append(value)
        type(self).told.set()


@pytest.fixture
def gauges(monkeypatch):
    FakeGauge.values, FakeGauge.told = {}, threading.Event()
    monkeypatch.setattr(metrics, "Gauge", FakeGauge)
    return FakeGauge.values


def test_ray_hears_at_once_and_of_the_last_values(gauges):
    telemetry = Telemetry("demo", 1, planned_steps=3)
    telemetry.write({"step": 1, "reward/mean": 0.25})
    with RayMetrics(telemetry):
        assert FakeGauge.told.wait(30)
        telemetry.write({"step": 2, "reward/mean": 0.75})
    assert gauges["argusrl_reward_mean"] == [0.25, 0.75]
    assert gauges["argusrl_planned_steps"] == [3, 3]


def test_a_ray_that_refuses_hurts_nothing_and_is_logged_once(monkeypatch, caplog):
    tries = []

    def refuse(*_, **__):
        tries.append(1)
        raise RuntimeError("no agent")

    monkeypatch.setattr(metrics, "Gauge", refuse)
    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.01)
    with caplog.at_level(logging.ERROR), RayMetrics(Telemetry("demo", 1, planned_steps=3)) as told:
        while len(tries) < 3:
            told._ended.wait(0.01)
    assert len([record for record in caplog.records if "metrics did not reach Ray" in record.message]) == 1


def test_an_attempt_knows_what_was_before_it(tmp_path):
    folder = RunFolder(tmp_path)
    EventLog(folder.events).write("fault", "engine 0 died")
    rows = [{"step": 1, "reward/mean": 0.5, "policy/trained_tokens": 40}]
    told = telemetry_of(folder, 2, Config.model_validate(VALUES), rows)
    values = {sample.series.name: sample.value for sample in told.samples()}
    assert told.labels == {"run": tmp_path.name, "attempt": "2"}
    assert values["argusrl_planned_steps"] == 7
    assert (values["argusrl_step"], values["argusrl_trained_tokens_total"], values["argusrl_faults_total"]) == (
        1,
        40,
        1,
    )
