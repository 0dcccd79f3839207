"""The declared metrics, and a few signs of life, as Prometheus knows them.

`reward/mean` becomes `argusrl_reward_mean`; a unit that a name does not hold is added to it (`_ratio`, `_nats`).
Labels are the run and the attempt, nothing else: no digest is ever a series. Telemetry holds the newest values; who
shows them (a port of the driver, Ray's exporter) asks for `samples`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from argusrl.observe.metrics import METRICS, Metric, MetricValue

if TYPE_CHECKING:
    from prometheus_client.core import Metric as MetricFamily

LABELS = ("run", "attempt")
PHASES = ("start", "canary", "resume", "rollout", "train", "sync", "commit", "checkpoint", "evaluate", "wait")
"""What a driver can be doing; `argusrl_phase` is the place in this list."""

_SUFFIXES = {"s": "seconds", "bytes": "bytes", "share": "ratio", "nat": "nats"}
_USEFUL = ("time/rollout_seconds", "time/train_seconds", "time/sync_seconds")
_FAULTS, _RECOVERIES = ("fault",), ("recovered", "healed")  # kinds of events


@dataclass(frozen=True, slots=True)
class Series:
    """One name that Prometheus sees. `<name>` in it stands for the name of a reward."""

    name: str
    unit: str
    meaning: str
    kind: Literal["gauge", "counter"] = "gauge"
    group: str = ""  # a row of the dashboard


@dataclass(frozen=True, slots=True)
class Sample:
    """The newest value of a series."""

    series: Series
    value: float


def exported_name(name: str, unit: str = "") -> str:
    """The name of a declared metric in Prometheus: `time/step_seconds` is `argusrl_time_step_seconds`."""
    words = re.sub(r"[^a-zA-Z0-9_<>]", "_", name)
    suffix = _SUFFIXES.get(unit, "")
    held = {suffix, unit} & set(words.split("_"))
    return f"argusrl_{words}" if held or not suffix else f"argusrl_{words}_{suffix}"


def _declared(metric: Metric) -> Series:
    group = "progress" if metric.name == "step" else metric.name.partition("/")[0]
    return Series(exported_name(metric.name, metric.unit), metric.unit, metric.meaning, group=group)


LIFE = (
    Series("argusrl_planned_steps", "steps", "steps that the recipe asks for", group="progress"),
    Series(
        "argusrl_heartbeat_timestamp_seconds",
        "s",
        "when the driver wrote its last heartbeat; time() less this is its age",
        group="progress",
    ),
    Series(
        "argusrl_phase",
        "",
        f"what the driver is doing: {', '.join(f'{place} {name}' for place, name in enumerate(PHASES))}",
        group="progress",
    ),
    Series("argusrl_sampled_tokens_total", "tokens", "sampled tokens of all committed steps", "counter", "progress"),
    Series("argusrl_trained_tokens_total", "tokens", "tokens trained on in all committed steps", "counter", "progress"),
    Series("argusrl_faults_total", "faults", "faults found, those of earlier attempts included", "counter", "recovery"),
    Series("argusrl_recoveries_total", "recoveries", "workers or whole steps brought back", "counter", "recovery"),
    Series(
        "argusrl_goodput_ratio",
        "share",
        "seconds of rollout, training and publication of committed steps / seconds since this attempt began",
        group="recovery",
    ),
)
"""Signs of life: what no row of a step tells."""

SERIES: Mapping[str, Series] = {
    series.name: series for series in (*(_declared(metric) for metric in METRICS.values() if not metric.text), *LIFE)
}
"""Everything that can be exported, by name."""

_OF_METRIC = {name: _declared(metric) for name, metric in METRICS.items() if not metric.text}
_PATTERNS = [
    (re.compile(re.escape(name).replace("<name>", "([^/]+)")), series)
    for name, series in _OF_METRIC.items()
    if "<name>" in name
]


def series_of(name: str) -> Series | None:
    """The series of a metric in a row; None for text, which Prometheus cannot hold."""
    if name in _OF_METRIC:
        return _OF_METRIC[name]
    for pattern, series in _PATTERNS:
        if match := pattern.fullmatch(name):
            own = exported_name(match[1]).removeprefix("argusrl_")
            return Series(series.name.replace("<name>", own), series.unit, series.meaning, series.kind, series.group)
    return None


class Telemetry:
    """The newest value of every series of one attempt. A sink; safe to use from several threads, never raises."""

    def __init__(self, run: str, attempt: int, *, planned_steps: int, began: float | None = None) -> None:
        """`began` is when the attempt began, in seconds since 1970."""
        self.labels = {"run": run, "attempt": str(attempt)}
        self._began = time.time() if began is None else began
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[str, Sample]] = {}  # by exported name, with the name of the metric
        self._useful_seconds = 0.0
        self._life: dict[str, float] = dict.fromkeys(
            ("argusrl_sampled_tokens_total", "argusrl_trained_tokens_total", "argusrl_faults_total"), 0.0
        )
        self._life |= {"argusrl_recoveries_total": 0.0, "argusrl_planned_steps": float(planned_steps)}

    def history(self, rows: Iterable[Mapping[str, MetricValue]], events: Iterable[Mapping[str, Any]]) -> None:
        """What was before this attempt: rows of committed steps, and events."""
        for row in rows:
            self._take(row)
        for event in events:
            self.heard(str(event.get("kind")))

    def write(self, row: Mapping[str, MetricValue]) -> None:
        """The row of a step that this attempt committed."""
        self._take(row)
        with self._lock:
            self._useful_seconds += sum(_number(row.get(name)) for name in _USEFUL)

    def close(self) -> None:
        """Nothing is held open."""

    def heard(self, kind: str) -> None:
        """An event of this kind was written."""
        with self._lock:
            self._life["argusrl_faults_total"] += kind in _FAULTS
            self._life["argusrl_recoveries_total"] += kind in _RECOVERIES

    def phase(self, name: str) -> None:
        """What the driver does from now on."""
        with self._lock:
            self._life["argusrl_phase"] = float(PHASES.index(name)) if name in PHASES else float("nan")

    def beat(self, at: float) -> None:
        """The driver wrote a heartbeat, at so many seconds since 1970."""
        with self._lock:
            self._life["argusrl_heartbeat_timestamp_seconds"] = at

    def samples(self) -> list[Sample]:
        """Everything that has a value by now, by name."""
        with self._lock:
            held = max(time.time() - self._began, 1e-9)
            life = {**self._life, "argusrl_goodput_ratio": min(1.0, self._useful_seconds / held)}
            found = [sample for _, sample in self._rows.values()]
        found += [Sample(series, life[series.name]) for series in LIFE if series.name in life]
        return sorted(found, key=lambda sample: sample.series.name)

    def _take(self, row: Mapping[str, MetricValue]) -> None:
        samples = {name: Sample(series, _number(row[name])) for name, series in _exported(row)}
        with self._lock:
            for name, sample in samples.items():
                # Of two rewards whose names Prometheus cannot tell apart the first one is shown.
                if self._rows.setdefault(sample.series.name, (name, sample))[0] == name:
                    self._rows[sample.series.name] = (name, sample)
            tokens = _number(row.get("rollout/response_tokens_mean")) * _number(row.get("rollout/trajectories"))
            self._life["argusrl_sampled_tokens_total"] += round(tokens)
            self._life["argusrl_trained_tokens_total"] += _number(row.get("policy/trained_tokens"))


def _exported(row: Mapping[str, MetricValue]) -> Iterator[tuple[str, Series]]:
    for name, value in row.items():
        series = series_of(name)
        if series is not None and value is not None:
            yield name, series


def _number(value: MetricValue) -> float:
    """0 where there is none. JSON files of a run folder spell what is not finite: float() reads it."""
    with suppress(TypeError, ValueError):
        return float(value)  # type: ignore[arg-type]
    return 0.0


class PrometheusPort:
    """Serves the samples of a Telemetry at /metrics of a port of this host. A sink: rows reach the Telemetry alone."""

    def __init__(self, telemetry: Telemetry, port: int) -> None:
        """Raises OSError if the port is taken."""
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(_Collector(telemetry))
        self._server, self._thread = start_http_server(port, registry=registry)
        self.port: int = self._server.server_port

    def write(self, row: Mapping[str, MetricValue]) -> None:
        """Nothing to do: a scrape reads the Telemetry."""

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _Collector:
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def describe(self) -> Sequence[MetricFamily]:
        """Nothing: what there is appears with the first steps."""
        return ()

    def collect(self) -> Iterator[MetricFamily]:
        """One family for each series that has a value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = [self._telemetry.labels[name] for name in LABELS]
        for sample in self._telemetry.samples():
            kind = CounterMetricFamily if sample.series.kind == "counter" else GaugeMetricFamily
            family = kind(sample.series.name, sample.series.meaning, labels=LABELS)
            family.add_metric(labels, sample.value)
            yield family
