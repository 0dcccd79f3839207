"""The run's telemetry through Ray: every node's exporter serves it, and whoever scrapes the cluster has it.

Ray puts `ray_` before each name, and labels of its own beside ours. Its counters keep their own count, so that what
counts is a gauge here, too; `rate()` works on both.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import psutil

from argusrl.config.sections import Config
from argusrl.observe.events import read_events
from argusrl.observe.prometheus import LABELS, Telemetry
from argusrl.storage.layout import RunFolder

_EVERY_SECONDS = 5.0  # Ray itself reports every ten


def telemetry_of(folder: RunFolder, attempt: int, config: Config, rows: Iterable[Mapping[str, Any]]) -> Telemetry:
    """What is known of a run at the start of an attempt; `rows` are those of its committed steps."""
    steps, began = config.algorithm.num_steps, psutil.Process().create_time()
    telemetry = Telemetry(folder.name, attempt, planned_steps=steps, began=began)
    telemetry.history(rows, read_events(folder.events))
    return telemetry


class RayMetrics:
    """While entered, hands the samples of a Telemetry to Ray every few seconds, on a thread of its own."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._gauges: dict[str, Any] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-metrics", daemon=True)

    def __enter__(self) -> RayMetrics:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Hand over the last values: Ray may not be asked once the driver has left it."""
        self._ended.set()
        self._thread.join(timeout=_EVERY_SECONDS)

    def _run(self) -> None:
        healthy = True
        while True:
            last = self._ended.is_set()
            try:
                self._hand_over()
                healthy = True
            except Exception:  # a run is not ended by its thermometer
                if healthy:
                    logging.exception("metrics did not reach Ray")
                healthy = False
            if last:
                return
            self._ended.wait(_EVERY_SECONDS)

    def _hand_over(self) -> None:
        from ray.util.metrics import Gauge

        for sample in self._telemetry.samples():
            name = sample.series.name
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, sample.series.meaning, tag_keys=LABELS)
            self._gauges[name].set(sample.value, tags=self._telemetry.labels)
