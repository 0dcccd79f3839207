from __future__ import annotations

import json
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from argusrl.config.sections import Config, MlflowSection, WandbSection
from argusrl.errors import ConfigError
from argusrl.observe.metrics import UndeclaredMetric
from argusrl.observe.sinks import (
    BackgroundSink,
    JsonlSink,
    MlflowSink,
    Sinks,
    TensorBoardSink,
    WandbSink,
    open_sinks,
    rebuild,
    require_sinks,
)
from argusrl.storage.layout import RunFolder
from argusrl.storage.publish import read_lines

WAIT_SECONDS = 30


def config(**observe: Any) -> Config:
    return Config.model_validate(
        {"model": {"path": "m"}, "data": {}, "rewards": [{"kind": "exact"}], "observe": observe}
    )


def row(step: int) -> dict[str, Any]:
    return {"step": step, "reward/mean": step / 10, "adapter/sha256": "ab"}


def scalars(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    return [(event.step, round(event.value, 6)) for event in events.Scalars("reward/mean")]


def test_metrics_are_rebuilt_from_committed_steps_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2}\n{"step": 3, "rew')
    rebuild(path, [row(1), row(2)])
    JsonlSink(path).write(row(3))
    assert read_lines(path) == [row(1), row(2), row(3)]


def test_tensorboard_holds_each_step_once_over_attempts(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.write(row(step))
    first.close()
    second = TensorBoardSink(tmp_path, history=[row(1), row(2)])
    second.write(row(3))
    second.close()
    assert scalars(tmp_path) == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_writing_tensorboard_files_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from argusrl.observe.sinks import TensorBoardSink\n"
        f"sink = TensorBoardSink(Path({str(tmp_path)!r})); sink.write({{'step': 1, 'policy/loss': 1.0}})\n"
        "sink.close(); assert 'torch' not in sys.modules and 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Blocking:
    """A sink that hangs until it is released."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.rows: list[Any] = []

    def write(self, row: Any) -> None:
        self.entered.set()
        self.release.wait(WAIT_SECONDS)
        self.rows.append(row)

    def close(self) -> None: ...


def test_a_blocking_sink_drops_rows_and_never_blocks() -> None:
    reports: list[tuple[str, str]] = []
    blocking = Blocking()
    sink = BackgroundSink("slow", lambda: blocking, lambda kind, text: reports.append((kind, text)), capacity=2)
    sink.write(row(1))
    assert blocking.entered.wait(WAIT_SECONDS)
    for step in range(2, 7):
        sink.write(row(step))
    assert sink.dropped == 3
    assert [kind for kind, _ in reports] == ["sink_dropped"]
    blocking.release.set()
    sink.close(WAIT_SECONDS)
    assert [written["step"] for written in blocking.rows] == [1, 2, 3]
    assert reports[-1][0] == "sink_incomplete"


def test_a_sink_that_hangs_for_good_is_given_up_at_the_deadline() -> None:
    reports: list[str] = []
    blocking = Blocking()
    sink = BackgroundSink("stuck", lambda: blocking, lambda kind, text: reports.append(kind), capacity=1)
    sink.write(row(1))
    assert blocking.entered.wait(WAIT_SECONDS)
    sink.write(row(2))
    sink.close(deadline_seconds=0.05)
    assert reports == ["sink_incomplete"]
    blocking.release.set()


def test_a_failing_sink_is_reported_once_and_training_goes_on() -> None:
    reports: list[tuple[str, str]] = []

    def make() -> Any:
        raise ConnectionError("no route")

    sink = BackgroundSink("remote", make, lambda kind, text: reports.append((kind, text)))
    for step in (1, 2, 3):
        sink.write(row(step))
    sink.close(WAIT_SECONDS)
    assert sink.failed == 3
    assert [kind for kind, _ in reports] == ["sink_failed", "sink_incomplete"]
    assert "no route" in reports[0][1]


def test_open_sinks_writes_files_and_refuses_undeclared_metrics(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    sinks = open_sinks(config(), folder, [row(1)], lambda kind, text: None)
    sinks.write(row(2))
    with pytest.raises(UndeclaredMetric):
        sinks.write({"step": 3, "made/up": 1.0})
    sinks.close()
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2]
    assert scalars(folder.tensorboard) == [(1, 0.1), (2, 0.2)]


def test_a_sink_whose_package_is_missing_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"argusrl\[wandb,mlflow\]"):
        require_sinks(config(wandb={"project": "p"}, mlflow={"uri": "u"}))
    require_sinks(config())


def test_no_sink_gets_a_row_that_another_refused() -> None:
    written: list[Any] = []

    class Memory:
        def write(self, row: Any) -> None:
            written.append(row)

        def close(self) -> None: ...

    with pytest.raises(UndeclaredMetric):
        Sinks([Memory()]).write({"step": 1, "nope": 1})
    assert written == []


def test_wandb_goes_on_under_the_same_id_and_gets_numbers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("end")
    )
    module = types.SimpleNamespace(init=lambda **settings: calls.append(settings) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    sink = WandbSink(WandbSection(project="p"), "demo", {"a": 1})
    sink.write(row(2))
    sink.close()
    assert (calls[0]["id"], calls[0]["resume"]) == ("demo", "allow")
    assert calls[1:] == [(2, {"reward/mean": 0.2}), "end"]


class FakeMlflow:
    """What MlflowSink uses of an MLflow client, over a list of runs."""

    def __init__(self) -> None:
        self.runs: list[Any] = []
        self.logged: list[tuple[str, str, float, int]] = []

    def get_experiment_by_name(self, name: str) -> Any:
        return None if not self.runs else types.SimpleNamespace(experiment_id="7")

    def create_experiment(self, name: str) -> str:
        return "7"

    def search_runs(self, experiments: list[str], where: str, max_results: int) -> list[Any]:
        assert where == "attributes.run_name = 'demo'"
        return self.runs

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.runs.append(types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1")))
        return self.runs[0]

    def log_param(self, run: str, key: str, value: str) -> None: ...

    def log_metric(self, run: str, name: str, value: float, step: int) -> None:
        self.logged.append((run, name, value, step))

    def set_terminated(self, run: str) -> None: ...


def test_mlflow_goes_on_with_the_run_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=lambda tracking_uri: client))
    for step in (1, 2):
        sink = MlflowSink(MlflowSection(uri="u"), "demo", {"a": 1})
        sink.write(row(step))
        sink.close()
    assert len(client.runs) == 1
    assert client.logged == [("r1", "reward/mean", 0.1, 1), ("r1", "reward/mean", 0.2, 2)]
