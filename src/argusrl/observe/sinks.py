"""Where metrics go. metrics.jsonl and TensorBoard files are projections of the commits; W&B and MLflow are optional.

A sink may not hurt training: whatever is not a local file runs on a thread of its own behind a bounded queue.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from argusrl.config.sections import Config, MlflowSection, WandbSection
from argusrl.errors import ConfigError
from argusrl.observe.metrics import MetricValue, checked_row, metric
from argusrl.observe.prometheus import PrometheusPort, Telemetry
from argusrl.observe.redact import Redactor
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import append_line, encode_line, replace_file

Row = Mapping[str, MetricValue]
Report = Callable[[str, str], None]  # (kind, message) of an event


class Sink(Protocol):
    """Takes checked rows in the order of their steps."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


def rebuild(path: Path, rows: Iterable[Row]) -> None:
    """Write metrics.jsonl anew from the rows of the committed steps, so that no step is doubled or missing."""
    replace_file(path, b"".join(encode_line(checked_row(row)) for row in rows))


class JsonlSink:
    """metrics.jsonl: one line per step, durable when written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, row: Row) -> None:
        append_line(self._path, row)

    def close(self) -> None:
        """Nothing is held open."""


class TensorBoardSink:
    """TensorBoard scalars, written without torch. A file per attempt; earlier steps are written again from history."""

    def __init__(self, folder: Path, history: Iterable[Row] = ()) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(exist_ok=True)  # never its parents: nothing may take the place of a run folder that is away
        for stale in folder.glob("events.out.tfevents.*"):
            stale.unlink()
        self._writer = EventFileWriter(str(folder))
        for row in history:
            self._add(row)
        self._writer.flush()

    def write(self, row: Row) -> None:
        self._add(row)
        self._writer.flush()

    def _add(self, row: Row) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers(row).items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step_of(row), summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases. A resumed run goes on under the same id."""

    def __init__(self, section: WandbSection, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=section.project, entity=section.entity, name=name, id=name, resume="allow", config=dict(config)
        )

    def write(self, row: Row) -> None:
        self._run.log(numbers(row), step=step_of(row))

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """An MLflow tracking server or folder."""

    def __init__(self, section: MlflowSection, name: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self._client = mlflow.MlflowClient(tracking_uri=section.uri)
        found = self._client.get_experiment_by_name(section.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(section.experiment)
        earlier = self._client.search_runs([experiment], f"attributes.run_name = '{name}'", max_results=1)
        run = earlier[0] if earlier else self._client.create_run(experiment, run_name=name)
        self._id = run.info.run_id
        if not earlier:
            for key, value in config.items():
                self._client.log_param(self._id, key, str(value)[:500])

    def write(self, row: Row) -> None:
        for name, value in numbers(row).items():
            self._client.log_metric(self._id, name, value, step=step_of(row))

    def close(self) -> None:
        self._client.set_terminated(self._id)


class BackgroundSink:
    """Runs a sink on its own thread. Rows that meet a full queue are dropped, the first error is reported."""

    def __init__(self, name: str, make: Callable[[], Sink], report: Report, capacity: int = 256) -> None:
        self._name, self._make, self._report = name, make, report
        self._queue: queue.Queue[Row | None] = queue.Queue(capacity)
        self.dropped = 0
        self.failed = 0
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, row: Row) -> None:
        """Never blocks, never raises."""
        try:
            self._queue.put_nowait(row)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._report("sink_dropped", f"{self._name} is too slow: rows are dropped (metrics.jsonl has all)")

    def close(self, deadline_seconds: float = 10.0) -> None:
        """Let the queue drain until the deadline, then give up on what is left."""
        end = time.monotonic() + deadline_seconds
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=deadline_seconds)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive() or self.dropped or self.failed:
            left = self._queue.qsize()
            self._report(
                "sink_incomplete",
                f"{self._name}: {self.dropped} rows dropped, {self.failed} failed, {left} not sent in time",
            )

    def _run(self) -> None:
        sink: Sink | None = None
        while True:
            row = self._queue.get()
            try:
                if row is None:
                    if sink is not None:
                        sink.close()
                    return
                sink = sink or self._make()
                sink.write(row)
            except Exception as error:
                self.failed += 1
                if self.failed == 1:
                    self._report("sink_failed", f"{self._name}: {type(error).__name__}: {error}")
                if row is None:
                    return


class Sinks:
    """All sinks of a run. Rows are checked against the declared metrics once, here."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, row: Row) -> None:
        """Raises UndeclaredMetric, and StorageError if metrics.jsonl cannot be written."""
        checked = checked_row(row)
        for sink in self._sinks:
            sink.write(checked)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def require_sinks(config: Config) -> None:
    """Raise ConfigError if the recipe asks for a sink whose package is not installed."""
    wanted = {"wandb": config.observe.wandb, "mlflow": config.observe.mlflow}
    missing = [name for name, section in wanted.items() if section and importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            [f"observe.{name}: the package {name} is not installed" for name in missing],
            f"pip install 'argusrl[{','.join(missing)}]', or set it to null",
        )


def open_sinks(
    config: Config, folder: RunFolder, history: Sequence[Row], report: Report, telemetry: Telemetry | None = None
) -> Sinks:
    """The sinks a recipe asks for, with metrics.jsonl and TensorBoard rebuilt from `history`: the rows of all
    committed steps. `telemetry` gets every row, and the port that the recipe asks for.

    `report` is called with (kind, message) when an optional sink fails. Raises ConfigError, StorageError.
    """
    require_sinks(config)
    rebuild(folder.metrics, history)
    sinks: list[Sink] = [JsonlSink(folder.metrics)]
    observe, name = config.observe, folder.name
    if observe.tensorboard:
        sinks.append(
            BackgroundSink("tensorboard", lambda: TensorBoardSink(folder.tensorboard, history), report, capacity=4096)
        )
    plain = Redactor().value(config.model_dump(mode="json"))
    if wandb := observe.wandb:
        sinks.append(BackgroundSink("wandb", lambda: WandbSink(wandb, name, plain), report))
    if mlflow := observe.mlflow:
        sinks.append(BackgroundSink("mlflow", lambda: MlflowSink(mlflow, name, plain), report))
    if telemetry is not None:
        sinks.append(telemetry)
        sinks += _prometheus_port(config, telemetry, report)
    return Sinks(sinks)


def _prometheus_port(config: Config, telemetry: Telemetry, report: Report) -> list[Sink]:
    if config.observe.prometheus_port is None:
        return []
    try:
        return [PrometheusPort(telemetry, config.observe.prometheus_port)]
    except OSError as error:
        report("sink_failed", f"prometheus: port {config.observe.prometheus_port}: {error.strerror or error}")
        return []


def numbers(row: Row) -> dict[str, float]:
    """What of a row can be plotted."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and value is not None and not isinstance(value, str) and not metric(name).text
    }


def step_of(row: Row) -> int:
    step = row["step"]
    assert isinstance(step, int)
    return step
