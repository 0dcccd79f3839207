"""The live panel of a run in a terminal."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from argusrl.config.sections import Config
from argusrl.observe.curve import braille
from argusrl.observe.display import PHASES, accuracy_text, duration, number, phase_seconds
from argusrl.observe.metrics import MetricValue, unhealthy
from argusrl.observe.redact import Redactor

Row = Mapping[str, MetricValue]

_COLOURS = {"rollout": "cyan", "train": "magenta", "sync": "yellow", "checkpoint": "blue", "evaluate": "green"}
_CURVE_HEIGHT = 6  # characters
_LABEL_WIDTH = 10
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_RECENT_STEPS = 8  # the time that is left is told from these


class PanelDisplay:
    """Reward curve, accuracy, speed, phase times and messages, redrawn four times a second."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live: Live | None = None
        self._lock = threading.Lock()  # the panel is redrawn by a thread of its own
        self._redactor = Redactor()
        self._name, self._model, self._total = "", "", 0
        self._rewards: list[float] = []
        self._row: Row = {}
        self._evaluations: list[tuple[int, Row]] = []  # the first and the newest
        self._messages: deque[tuple[str, bool]] = deque(maxlen=3)
        self._restarts = 0
        self._phase, self._phase_since = "starting", time.monotonic()
        self._since = time.monotonic()
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def start(self, config: Config, folder: Path, history: Sequence[Row] = ()) -> None:
        self._name, self._model, self._total = folder.name, config.model.path, config.algorithm.num_steps
        for row in history:
            self._take(row)
            if any(name.startswith("evaluate/") for name in row):
                self.evaluation(int(row["step"] or 0), row)
        self._live = Live(console=self._console, get_renderable=lambda: self, refresh_per_second=4)
        self._live.start()

    def phase(self, name: str) -> None:
        self._phase, self._phase_since = name, time.monotonic()

    def step(self, row: Row) -> None:
        with self._lock:
            self._take(row)

    def evaluation(self, step: int, metrics: Row) -> None:
        with self._lock:
            self._evaluations = [*self._evaluations[:1], (step, metrics)]

    def message(self, text: str, warning: bool = False) -> None:
        with self._lock:
            self._messages.append((self._redactor.text(text), warning))

    def restarted(self, count: int) -> None:
        self._restarts = count

    def stop(self, lines: Sequence[str] = ()) -> None:
        if self._live is None:
            return
        self._phase = "stopped"
        self._live.stop()
        self._live = None
        for line in lines:
            self._console.print(self._redactor.text(line), highlight=False, markup=False)

    def _take(self, row: Row) -> None:
        self._row = row
        reward, seconds = row.get("reward/mean"), row.get("time/step_seconds")
        if isinstance(reward, (int, float)):
            self._rewards.append(float(reward))
        if isinstance(seconds, (int, float)):
            self._recent.append(float(seconds))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            panel = self._panel(options.max_width - 4)
        yield panel

    def _panel(self, width: int) -> Panel:
        parts: list[RenderableType] = [
            self._header(),
            *self._curve(width),
            Rule(style="grey30"),
            self._facts(),
        ]
        phases = phase_seconds(self._row)
        if phases:
            parts += [Text(), *self._phases(phases, width)]
        warnings = [(line, True) for line in (unhealthy(self._row) if self._row else [])[:2]]
        notes = [*warnings, *self._messages]
        if notes:
            parts.append(Rule(style="grey30"))
            parts += [Text(("▲ " if bad else "· ") + text, style="yellow" if bad else "default") for text, bad in notes]
        return Panel(
            Group(*parts),
            title=Text.assemble(("argusrl", "bold"), (" · ", "dim"), (self._name, "bold cyan")),
            title_align="left",
            subtitle=self._status(),
            subtitle_align="left",
            border_style="grey50",
            padding=(0, 1),
        )

    def _header(self) -> RenderableType:
        step = self._row.get("step") or 0
        done = int(step) if isinstance(step, (int, float)) else 0
        clock = duration(time.monotonic() - self._since)
        if self._recent and done < self._total:
            left = (self._total - done) * sum(self._recent) / len(self._recent)
            clock += f", about {duration(left)} left"
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(width=_LABEL_WIDTH)
        grid.add_column(ratio=1)
        grid.add_column(justify="right")
        bar = ProgressBar(total=max(1, self._total), completed=done, complete_style="cyan", finished_style="green")
        grid.add_row(Text(f"{done}/{self._total}", style="bold"), bar, Text(clock, style="dim"))
        return grid

    def _curve(self, width: int) -> list[RenderableType]:
        values = self._rewards
        low = min([0.0, *values])
        high = max([1.0, *values]) if low >= 0 else max([0.0, *values])
        plot = braille(values, max(8, width - _LABEL_WIDTH - 2), _CURVE_HEIGHT, low, high)
        labels = {
            0: number(high),
            _CURVE_HEIGHT // 2: "reward",
            _CURVE_HEIGHT - 1: number(low),
        }
        lines: list[RenderableType] = []
        for index, line in enumerate(plot):
            label = labels.get(index, "").rjust(_LABEL_WIDTH - 1)
            style = "bold" if label.strip() == "reward" else "dim"
            lines.append(Text.assemble((label, style), (" ▏", "grey30"), (line, "bright_cyan")))
        return lines

    def _facts(self) -> RenderableType:
        row = self._row
        grid = Table.grid(padding=(0, 2))
        for _ in range(6):
            grid.add_column()
        cells = [
            ("reward", f"{number(row.get('reward/mean'))} ±{number(row.get('reward/std'))}"),
            ("tokens/s", number(row.get("rollout/tokens_per_second"))),
            ("grad norm", number(row.get("policy/grad_norm"))),
            ("entropy", number(row.get("policy/entropy"))),
            ("reply", f"{number(row.get('rollout/response_tokens_mean'))} tokens"),
            ("gap max", number(row.get("policy/logprob_gap_max"))),
            ("adapter", f"v{number(row.get('adapter/version'))} {str(row.get('adapter/sha256') or '')[:8]}"),
            ("failed", number(row.get("rollout/failed_trajectories"))),
            ("rate", number(row.get("policy/learning_rate"))),
        ]
        for first in range(0, len(cells), 3):
            parts: list[Text] = []
            for label, value in cells[first : first + 3]:
                parts += [Text(label, style="dim"), Text(value, style="bold")]
            grid.add_row(*parts)
        lines: list[RenderableType] = [grid]
        for step, metrics in dict(self._evaluations).items():
            newest = step == self._evaluations[-1][0]
            text = Text.assemble(("held out  ", "dim"), (accuracy_text(metrics), "bold green" if newest else "default"))
            text.append("  before training" if step == 0 else f"  after step {step}", style="dim")
            lines.append(text)
        return Group(*lines)

    def _phases(self, phases: Mapping[str, float], width: int) -> list[RenderableType]:
        whole = sum(phases.values())
        bar, legend = Text(), Text()
        for name in (*PHASES, "other"):
            seconds = phases.get(name, 0.0)
            colour = _COLOURS.get(name, "grey50")
            if seconds:
                bar.append("━" * round(seconds / whole * width), style=colour)
                legend.append("■ ", style=colour)
                legend.append(f"{name} {seconds:.2f} s   ", style="dim")
        bar.truncate(width)
        return [bar, legend]

    def _status(self) -> Text:
        now = time.monotonic()
        frame = "■" if self._phase == "stopped" else _SPINNER[int(now * 8) % len(_SPINNER)]
        text = Text.assemble((f"{frame} ", "cyan"), (self._phase, _COLOURS.get(self._phase, "bold")))
        if self._phase != "stopped":
            text.append(f" {duration(now - self._phase_since)}", style="dim")
        if self._restarts:
            text.append(f"  restarts {self._restarts}", style="yellow")
        return text
