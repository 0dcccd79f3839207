from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from argusrl.cluster import hang_reports
from argusrl.cluster.hang_reports import (
    END_PATTERN,
    PROGRESS_PATTERN,
    end_line,
    progress_line,
    rule,
    start_hang_reports,
)


def test_the_lines_are_what_the_rule_looks_for():
    assert re.search(PROGRESS_PATTERN, progress_line(12, 100, "train"))
    assert not re.search(PROGRESS_PATTERN, end_line("all 100 steps are committed"))
    found = rule(1800.0, 90.0)
    assert (found["log_pattern"], found["stop_pattern"]) == (PROGRESS_PATTERN, END_PATTERN)
    assert (found["timeout_minutes"], found["start_timeout_minutes"]) == (30.0, 1.5)
    assert len(PROGRESS_PATTERN) <= 256  # the agent takes no longer ones, and RE2 no look-around
    assert "(?" not in PROGRESS_PATTERN


class Monitoring:
    """Stands for AWS's class."""

    told: ClassVar[list] = []

    def __init__(self, config) -> None:
        self.config = config

    def start(self):
        self.told.append(self.config)
        self.result = {"status": "configured"}
        return self


@pytest.fixture
def library(monkeypatch):
    module = ModuleType(hang_reports.LIBRARY)
    module.LogMonitorConfig = lambda **fields: SimpleNamespace(**fields)
    module.SageMakerLogMonitoring = Monitoring
    Monitoring.told = []
    monkeypatch.setitem(sys.modules, hang_reports.LIBRARY.partition(".")[0], ModuleType("package"))
    monkeypatch.setitem(sys.modules, hang_reports.LIBRARY, module)
    monkeypatch.setenv("HYPERPOD_JMA_HOST", "10.0.0.7")
    return module


def test_the_agent_is_told_once_and_only_to_notify(library):
    assert "configured" in start_hang_reports(1800.0, 600.0)
    (config,) = Monitoring.told
    assert (config.enabled, config.action, len(config.rules)) == (True, "notify", 1)


def test_without_agent_or_library_or_where_it_breaks_nothing_happens(library, monkeypatch):
    monkeypatch.setattr(library, "LogMonitorConfig", lambda **_: 1 / 0)
    assert "ZeroDivisionError" in start_hang_reports(1.0, 1.0)
    monkeypatch.setitem(sys.modules, hang_reports.LIBRARY, None)
    assert "not installed" in start_hang_reports(1.0, 1.0)
    monkeypatch.delenv("HYPERPOD_JMA_HOST")
    assert "not set" in start_hang_reports(1.0, 1.0)
    assert Monitoring.told == []
