"""Write deploy/grafana/argusrl.json, the Grafana dashboard, from the declarations in the code.

    python scripts/write_dashboard.py            # write it
    python scripts/write_dashboard.py --check    # exit code 1 if it is out of date

A panel for each declared metric, its healthy range as a band; a row for each group. A metric of three words shares a
panel with its siblings (evaluate/greedy/accuracy, …/low, …/high), and the seconds of a step are stacked.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from argusrl.observe.metrics import METRICS, Metric
from argusrl.observe.prometheus import LIFE, PHASES, Series, series_of

FILE = Path(__file__).parents[1] / "deploy" / "grafana" / "argusrl.json"

ROWS = {
    "Progress": ("progress",),
    "Reward": ("reward", "evaluate"),
    "Rollout": ("rollout",),
    "Policy": ("policy",),
    "Adapter": ("adapter",),
    "Compute": ("compute",),
    "Time": ("time",),
    "Recovery": ("recovery",),
    "Cluster": ("memory",),
}
"""Title of a row → groups of metrics (what stands before the first slash) in it."""

NODES = {
    "node_cpu_utilization": ("CPU use of a node", "percent"),
    "node_mem_used_host": ("memory used on a node", "bytes"),
    "node_gpus_utilization": ("GPU use", "percent"),
    "node_gram_used": ("GPU memory used", "decmbytes"),
    "node_gpu_temperature_celsius": ("GPU temperature", "celsius"),
    "node_disk_free": ("free space on a node's own disk", "bytes"),
    "node_network_receive_speed": ("network: received", "Bps"),
    "object_store_memory": ("Ray's object store", "bytes"),
}
"""What Ray's own exporters tell of nodes (with ray_ before the name): the end of the row Cluster."""

_UNITS = {"s": "s", "bytes": "bytes", "share": "percentunit", "tokens/s": "short"}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 24
_RANGE = "$__rate_interval"


def selector(name: str) -> str:
    """The series of this name of the chosen runs, served by the driver's own port or by Ray's exporter.

    `<name>` stands for any reward.
    """
    words = name.replace("<name>", ".+")
    return f'{{__name__=~"(ray_)?{words}", run=~"$run", attempt=~"$attempt"}}'


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, groups in ROWS.items():
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": _place(0, top, _COLUMNS, 1)})
        top += 1
        row = [*_of_groups(groups), *(_of_nodes() if title == "Cluster" else ())]
        for number, panel in enumerate(row):
            left = _WIDTH * number % _COLUMNS
            panels.append({**panel, "gridPos": _place(left, top + _WIDTH * number // _COLUMNS * _HEIGHT)})
        top += -(-len(row) * _WIDTH // _COLUMNS) * _HEIGHT
    return {
        "title": "argusrl",
        "uid": "argusrl",
        "description": "Runs of argusrl. Written by scripts/write_dashboard.py; do not edit.",
        "tags": ["argusrl", "ray"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def expressions() -> list[str]:
    """Every PromQL expression of the dashboard, those of its variables included."""
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    variables = [variable["query"]["query"] for variable in _variables() if variable["type"] == "query"]
    return [*panels, *(query.removeprefix("label_values(").rpartition(",")[0] for query in variables)]


def _of_groups(groups: Sequence[str]) -> Iterator[dict[str, Any]]:
    for names in _together([name for name in METRICS if _group(METRICS[name]) in groups]):
        yield _panel_of([METRICS[name] for name in names])
    for series in LIFE:
        if series.group in groups:
            yield _panel_of_life(series)


def _group(metric: Metric) -> str:
    if metric.text:
        return ""
    return "progress" if metric.name == "step" else metric.name.partition("/")[0]


def _together(names: Sequence[str]) -> list[list[str]]:
    """Names that share a panel."""
    shared: dict[str, list[str]] = {}
    for name in names:
        parent = name.rpartition("/")[0]
        phase = name.startswith("time/") and name != "time/step_seconds"
        alone = name if "/" not in parent or "<" in parent else parent
        shared.setdefault("time" if phase else alone, []).append(name)
    return list(shared.values())


def _panel_of(metrics: Sequence[Metric]) -> dict[str, Any]:
    first = metrics[0]
    if len(metrics) == 1:
        legend = "{{__name__}} {{run}} {{attempt}}" if "<name>" in first.name else "{{run}} {{attempt}}"
        return _panel(first.name, first.meaning, first.unit, [(_newest(first), legend)], (first.low, first.high))
    parent = first.name.rpartition("/")[0]
    targets = [(_newest(metric), f"{metric.name.rpartition('/')[2]} {{{{run}}}} {{{{attempt}}}}") for metric in metrics]
    if parent != "time":
        return _panel(parent, first.meaning, first.unit, targets)
    panel = _panel("time of a step", "wall time of the phases of a step", first.unit, targets)
    panel["fieldConfig"]["defaults"]["custom"] |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    return panel


def _newest(metric: Metric) -> str:
    series = series_of(metric.name.replace("<name>", "NAME"))
    assert series is not None
    by = "run, attempt, __name__" if "<name>" in metric.name else "run, attempt"
    return f"max by ({by}) ({selector(series.name.replace('NAME', '<name>'))})"


def _panel_of_life(series: Series) -> dict[str, Any]:
    title = series.name.removeprefix("argusrl_").replace("_", " ")
    newest = f"max by (run, attempt) ({selector(series.name)})"
    legend = "{{run}} {{attempt}}"
    if series.name == "argusrl_heartbeat_timestamp_seconds":
        age = f"time() - max by (run) ({selector(series.name)})"
        return _panel("age of the heartbeat", series.meaning, "s", [(age, "{{run}}")], (None, 60.0))
    if series.name == "argusrl_phase":
        return _phases(series, newest)
    if series.unit == "tokens":
        rate = f"sum by (run) (rate({selector(series.name)}[{_RANGE}]))"
        return _panel(title.replace(" total", " per second"), series.meaning, "", [(rate, "{{run}}")])
    return _panel(title, series.meaning, series.unit, [(newest, legend)])


def _phases(series: Series, expression: str) -> dict[str, Any]:
    panel = _panel("phase", series.meaning, "", [(expression, "{{run}} {{attempt}}")])
    values = {str(number): {"text": name, "index": number} for number, name in enumerate(PHASES)}
    panel |= {"type": "state-timeline", "options": {"showValue": "auto", "mergeValues": True}}
    panel["fieldConfig"]["defaults"] = {"mappings": [{"type": "value", "options": values}]}
    return panel


def _of_nodes() -> Iterator[dict[str, Any]]:
    for name, (title, unit) in NODES.items():
        yield _panel(title, "from Ray's own exporter", unit, [(f"ray_{name}", "{{instance}}")])


def _panel(
    title: str,
    meaning: str,
    unit: str,
    targets: Sequence[tuple[str, str]],
    healthy: tuple[float | None, float | None] = (None, None),
) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "description": meaning,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {
                "unit": _UNITS.get(unit, unit if unit in {unit for _, unit in NODES.values()} else "short"),
                "custom": {"lineWidth": 1, "spanNulls": True, "thresholdsStyle": {"mode": "area"}},
                "thresholds": {"mode": "absolute", "steps": _steps(*healthy)},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": f"{chr(65 + number)}", "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for number, (expression, legend) in enumerate(targets)
        ],
    }


def _steps(low: float | None, high: float | None) -> list[dict[str, Any]]:
    """Red below `low` and above `high`, nothing between."""
    steps: list[dict[str, Any]] = [{"color": "transparent" if low is None else "red", "value": None}]
    if low is not None:
        steps.append({"color": "transparent", "value": low})
    if high is not None:
        steps.append({"color": "red", "value": high})
    return steps


def _place(left: int, top: int, width: int = _WIDTH, height: int = _HEIGHT) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _variables() -> list[dict[str, Any]]:
    step = '__name__=~"(ray_)?argusrl_step"'
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
        _variable("run", f"label_values({{{step}}}, run)"),
        _variable("attempt", f'label_values({{{step}, run=~"$run"}}, attempt)'),
    ]


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "label": name.capitalize(),
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def exported(expression: str) -> list[str]:
    """The names (regular expressions of them) that an expression reads."""
    return re.findall(r'__name__=~"\(ray_\)\?([^"]+)"', expression) or [expression]


def main() -> int:
    """Write the file, or say that it is out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if it is out of date")
    check = parser.parse_args().check
    text = json.dumps(dashboard(), indent=1) + "\n"
    if FILE.is_file() and FILE.read_text(encoding="utf-8") == text:
        return 0
    if not check:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(text, encoding="utf-8")
    print(f"deploy/grafana/{FILE.name} {'is out of date: run scripts/write_dashboard.py' if check else 'written'}")
    return int(check)


if __name__ == "__main__":
    sys.exit(main())
