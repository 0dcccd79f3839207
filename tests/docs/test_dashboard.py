"""The Grafana dashboard is what the declarations say."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from argusrl.cluster.manifests.render import render
from argusrl.config.load import load_config
from argusrl.observe.metrics import METRICS
from argusrl.observe.prometheus import LIFE, SERIES, series_of
from prometheus_server import ROOT, script

board = script("write_dashboard")
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "argusrl.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def names() -> set[str]:
    return {name for expression in board.expressions() for name in board.exported(expression)}


def test_it_is_current():
    assert board.dashboard() == DASHBOARD, "run scripts/write_dashboard.py"


def test_every_expression_names_something_that_is_exported():
    known = {name.replace("<name>", ".+") for name in SERIES} | {f"ray_{name}" for name in board.NODES}
    assert names() <= known


def test_everything_that_is_exported_has_a_panel():
    assert {name.replace("<name>", ".+") for name in SERIES} <= names()


def test_what_is_said_of_nodes_ray_exports():
    reporter = pytest.importorskip("ray.dashboard.modules.reporter.reporter_agent")
    ours = {name for name in board.NODES if name != "object_store_memory"}  # that one is of the raylet
    assert ours <= reporter.METRICS_GAUGES.keys()


def test_every_group_of_metrics_is_in_one_row():
    groups = [group for groups in board.ROWS.values() for group in groups]
    assert len(set(groups)) == len(groups)
    used = {series_of(name.replace("<name>", "x")).group for name, metric in METRICS.items() if not metric.text}
    assert used | {series.group for series in LIFE} == set(groups)


def test_runs_and_attempts_can_be_chosen():
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "run", "attempt"}
    for panel in PANELS:
        for target in panel["targets"]:
            assert not re.findall(r"argusrl_", target["expr"]) or 'run=~"$run"' in target["expr"]
            assert target["datasource"]["uid"] == "${datasource}"


def test_panels_have_names_of_their_own_and_do_not_overlap():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_healthy_ranges_are_drawn():
    panel = next(panel for panel in PANELS if panel["title"] == "policy/grad_norm")
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [(step["color"], step["value"]) for step in steps] == [("red", None), ("transparent", 0), ("red", 100)]


def test_the_pod_monitor_scrapes_what_manifests_render():
    monitor = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "pod_monitor.yaml").read_text())["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (requirement,) = monitor["selector"]["matchExpressions"]
    recipe = load_config(ROOT / "recipes" / "qwen3vl_8b_hyperpod.yaml").config
    (job,) = [document.value for document in render(recipe) if document.kind == "RayJob"]
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for template in [group["template"] for group in groups]:
        ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
        assert ports[endpoint["port"]] == 8080
        assert requirement["key"] in template["metadata"]["labels"]
