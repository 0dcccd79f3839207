"""What `argusrl train` refuses, and what it will compare."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from planned import QUICKSTART, mazes

from argusrl.cluster.plan import machine
from argusrl.cluster.plan.prediction import predict, require_fit
from argusrl.config.load import load_config
from argusrl.config.sections import Config
from argusrl.errors import ConfigError

NODES = ("cluster.kubernetes.workers.instance=ml.g7e.12xlarge", "cluster.kubernetes.workers.nodes=3")


@pytest.fixture
def quickstart(tiny_model: object, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """The recipe on a machine with CPUs and so many bytes of free memory."""

    def recipe(*changes: str, free_bytes: int = 16 << 30) -> Config:
        monkeypatch.setattr(machine, "local_gpus", lambda: [])
        monkeypatch.setattr(machine, "_available_bytes", lambda: free_bytes)
        return load_config(QUICKSTART, changes).config

    return recipe


def test_what_fits_is_not_spoken_of(quickstart: Callable[..., Config]) -> None:
    assert require_fit(quickstart()) == []
    assert require_fit(mazes(*NODES)) == []


def test_what_cannot_fit_is_refused_with_the_limit_and_the_key(quickstart: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"host memory in .* needs .* there is 1.00 GiB") as caught:
        require_fit(quickstart(free_bytes=1 << 30))
    assert "argusrl plan" in caught.value.hint
    with pytest.raises(ConfigError, match="engine's weights") as caught:
        require_fit(mazes(*NODES, "engine.gpu_memory_share=0.1"))
    assert "engine.gpu_memory_share=0.3" in caught.value.hint
    with pytest.raises(ConfigError, match="host memory of a worker node") as caught:
        require_fit(mazes(*NODES, "cluster.kubernetes.workers.memory=40Gi"))
    assert "try cluster.kubernetes.workers.memory=" in caught.value.hint


def test_what_only_the_fullest_micro_batch_breaks_is_a_warning() -> None:
    warnings = require_fit(mazes(*NODES, "model.max_tokens=200000", "environment.max_turns=2"))
    assert warnings
    assert all(line.startswith("may not fit: GPU with rank and engine in") for line in warnings)


def test_a_model_of_unknown_size_is_left_to_the_check_of_the_input() -> None:
    assert require_fit(mazes(*NODES, "model.path=/fsx/fsx/not/here")) == []
    assert predict(mazes("model.path=/fsx/not/here")) is None


def test_predictions_have_the_names_of_the_metrics() -> None:
    from argusrl.observe.metrics import metric

    found = predict(mazes(*NODES))
    assert found is not None
    assert found.rank_bytes > 5 << 30
    assert found.engine_bytes > 40 << 30
    for name in found.seconds:
        assert metric(name).unit == "s"
    assert found.seconds["time/step_seconds"] > found.seconds["time/train_seconds"]


def test_without_the_speed_of_a_gpu_no_seconds_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "local_gpus", lambda: [("NVIDIA Toaster", 80 << 30)])
    found = predict(mazes("cluster.address=local", "cluster.kubernetes=null"))
    assert found is not None
    assert found.seconds == {}
