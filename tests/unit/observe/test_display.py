from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from argusrl.config.sections import Config
from argusrl.observe.display import Display, NoDisplay, PlainDisplay, duration, make_display, number, phase_seconds
from argusrl.observe.panel import PanelDisplay

CONFIG = Config.model_validate(
    {"model": {"path": "m"}, "data": {}, "rewards": [{"kind": "exact"}], "algorithm": {"num_steps": 12}}
)
ROW: dict[str, Any] = {
    "step": 3,
    "reward/mean": 0.75,
    "reward/std": 0.2,
    "rollout/tokens_per_second": 1834.2,
    "rollout/failed_trajectories": 2,
    "time/step_seconds": 2.0,
    "time/rollout_seconds": 1.0,
    "time/train_seconds": 0.5,
    "adapter/version": 3,
    "adapter/sha256": "ab12cd34ef",
}
EVALUATION = {"evaluate/sampled/accuracy": 0.5, "evaluate/sampled/low": 0.4, "evaluate/sampled/high": 0.6}


def play(display: Display, secret: str = "") -> None:
    display.start(CONFIG, Path("runs/demo"), [])
    display.phase("rollout")
    display.evaluation(0, EVALUATION)
    display.step(ROW)
    display.message(f"an engine was rebuilt {secret}", warning=True)
    display.restarted(1)
    display.stop(["all done"])
    display.stop(["never shown"])


def test_plain_lines_tell_everything_and_mask_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2")
    stream = io.StringIO()
    play(PlainDisplay(stream), secret="hunter2")
    text = stream.getvalue()
    for words in (
        "run demo",
        "step 3/12",
        "reward 0.750",
        "failed 2",
        "sampled 0.500 (0.400–0.600)",
        "rebuilt",
        "all done",
    ):
        assert words in text
    assert "hunter2" not in text
    assert "never shown" not in text


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_panel_fits_any_terminal_and_shows_the_newest_state(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    play(PanelDisplay(console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("demo", "3/12", "0.500", "rebuilt", "all done"):
        assert words in text
    assert "never shown" not in text


def test_a_resumed_panel_shows_the_steps_before() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    display = PanelDisplay(console)
    display.start(CONFIG, Path("runs/demo"), [{"step": 0, **EVALUATION}, ROW])
    display.stop()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3/12" in text
    assert "before training" in text


def test_the_display_depends_on_the_terminal() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True)
    pipe = Console(file=io.StringIO(), force_terminal=False)
    assert isinstance(make_display("auto", terminal), PanelDisplay)
    assert isinstance(make_display("auto", pipe), PlainDisplay)
    assert isinstance(make_display("plain", terminal), PlainDisplay)
    assert isinstance(make_display("rich", pipe), PanelDisplay)
    assert isinstance(make_display("none", terminal), NoDisplay)


def test_seconds_that_no_phase_explains_are_shown_as_other() -> None:
    assert phase_seconds(ROW) == {"rollout": 1.0, "train": 0.5, "other": 0.5}


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (1234.5, "1,234"), (0.5, "0.500"), (12.345, "12.35"), (3.2e-6, "3.2e-06"), ("x", "x")],
)
def test_numbers_are_short(value: Any, text: str) -> None:
    assert number(value) in (text, text.replace("12.35", "12.34"))


def test_durations() -> None:
    assert duration(252) == "4:12"
    assert duration(3852) == "1:04:12"
