"""What a person sees while a run is under way: a live panel in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from argusrl.config.sections import Config
from argusrl.observe.metrics import MetricValue
from argusrl.observe.redact import Redactor

Row = Mapping[str, MetricValue]


class Display(Protocol):
    """Calls come from one thread, in this order: start, then any of the middle ones, then stop."""

    def start(self, config: Config, folder: Path, history: Sequence[Row] = ()) -> None:
        """The run begins or goes on; `history` holds the rows of committed steps."""
        ...

    def phase(self, name: str) -> None:
        """What is being done now: "rollout", "train", "sync", "checkpoint", "evaluate", "engines start", …"""
        ...

    def step(self, row: Row) -> None:
        """A step is committed."""
        ...

    def evaluation(self, step: int, metrics: Row) -> None:
        """Held-out accuracy after `step` (0 is before training), names as in metrics.py."""
        ...

    def message(self, text: str, warning: bool = False) -> None:
        """Something a person should know: a resume, a restart, a pause, a failed service."""
        ...

    def restarted(self, count: int) -> None:
        """How often something had to be restarted in this run so far."""
        ...

    def stop(self, lines: Sequence[str] = ()) -> None:
        """Take the panel down and print the closing lines. May be called twice."""
        ...


class NoDisplay:
    """Shows nothing."""

    def start(self, config: Config, folder: Path, history: Sequence[Row] = ()) -> None: ...

    def phase(self, name: str) -> None: ...

    def step(self, row: Row) -> None: ...

    def evaluation(self, step: int, metrics: Row) -> None: ...

    def message(self, text: str, warning: bool = False) -> None: ...

    def restarted(self, count: int) -> None: ...

    def stop(self, lines: Sequence[str] = ()) -> None: ...


class PlainDisplay:
    """One line per step and per event, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._total = 0
        self._redactor = Redactor()
        self._stopped = False

    def start(self, config: Config, folder: Path, history: Sequence[Row] = ()) -> None:
        self._total = config.algorithm.num_steps
        self._print(f"run {folder.name}: {self._total} steps, model {config.model.path}, folder {folder}")
        if history:
            self._print(f"goes on after step {history[-1].get('step')}")

    def phase(self, name: str) -> None:
        """Phases are in the step's line as times."""

    def step(self, row: Row) -> None:
        parts = [
            f"step {row['step']}/{self._total}",
            f"reward {number(row.get('reward/mean'))} ±{number(row.get('reward/std'))}",
            f"{number(row.get('rollout/tokens_per_second'))} tok/s",
            f"grad {number(row.get('policy/grad_norm'))}",
            f"gap {number(row.get('policy/logprob_gap_max'))}",
            " ".join(f"{name} {seconds:.1f}s" for name, seconds in phase_seconds(row).items()),
        ]
        failed = row.get("rollout/failed_trajectories")
        self._print("  ".join(parts) + (f"  failed {failed}" if failed else ""))

    def evaluation(self, step: int, metrics: Row) -> None:
        self._print(f"evaluation after step {step}: {accuracy_text(metrics)}")

    def message(self, text: str, warning: bool = False) -> None:
        self._print(f"{'warning: ' if warning else ''}{text}")

    def restarted(self, count: int) -> None:
        self._print(f"restarts so far: {count}")

    def stop(self, lines: Sequence[str] = ()) -> None:
        if not self._stopped:
            self._stopped = True
            for line in lines:
                self._print(line)

    def _print(self, text: str) -> None:
        clock = time.strftime("%H:%M:%S")
        print(f"{clock}  {self._redactor.text(text)}", file=self._stream, flush=True)


def make_display(kind: str, console: Any = None) -> Display:
    """The display for `observe.display`: auto is the panel where standard output is a terminal."""
    if kind == "none":
        return NoDisplay()
    terminal = console.is_terminal if console is not None else sys.stdout.isatty()
    if kind == "rich" or (kind == "auto" and terminal):
        from argusrl.observe.panel import PanelDisplay

        return PanelDisplay(console)
    return PlainDisplay()


PHASES = ("rollout", "train", "sync", "checkpoint", "evaluate")


def phase_seconds(row: Row) -> dict[str, float]:
    """Seconds of each phase of a step; "other" is what no phase explains."""
    found = {}
    for name in PHASES:
        value = row.get(f"time/{name}_seconds")
        if isinstance(value, (int, float)) and value > 0:
            found[name] = float(value)
    whole = row.get("time/step_seconds")
    inside = sum(seconds for name, seconds in found.items() if name != "evaluate")
    if isinstance(whole, (int, float)) and whole - inside > 0.05 * whole:
        found["other"] = whole - inside
    return found


def number(value: MetricValue) -> str:
    """A number for people: four significant digits, thousands separated; – for none."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.2g}"
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.3f}"


def accuracy_text(metrics: Row) -> str:
    """'greedy 0.912, sampled 0.855 (0.800–0.893)'."""
    parts = []
    for mode in ("greedy", "sampled"):
        name = f"evaluate/{mode}/accuracy"
        if metrics.get(name) is None:
            continue
        low, high = metrics.get(f"evaluate/{mode}/low"), metrics.get(f"evaluate/{mode}/high")
        interval = f" ({number(low)}–{number(high)})" if low is not None and high is not None else ""
        parts.append(f"{mode} {number(metrics[name])}{interval}")
    return ", ".join(parts) or "no result"


def duration(seconds: float) -> str:
    """'4:12' or '1:04:12'."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
