from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fakes.kubernetes_api import MemoryKube, Store
from fakes.kubernetes_recipe import RECIPE, ROOT, kubernetes_config, rendered


@pytest.fixture(scope="module")
def studio() -> ModuleType:
    spec = importlib.util.spec_from_file_location("studio_submit", ROOT / "examples" / "studio_submit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["studio_submit"] = module
    spec.loader.exec_module(module)
    return module


class Objects:
    """The custom objects of a cluster whose endpoint operator takes a while."""

    def __init__(self, looks: int) -> None:
        self.looks, self.made = looks, dict[str, Any]()

    def create_namespaced_custom_object(self, **call: Any) -> dict[str, Any]:
        self.made = call
        return {"metadata": {"name": "c-1"}}

    def get_namespaced_custom_object(self, **call: Any) -> dict[str, Any]:
        assert call["name"] == "c-1"
        self.looks -= 1
        return {"metadata": {"name": "c-1"}, "status": {"connectionUrl": "https://x"} if self.looks <= 0 else {}}


def test_the_link_is_waited_for(studio: ModuleType) -> None:
    objects = Objects(2)
    assert studio.dashboard_url(objects, "maze-s1-abc", "team", look_seconds=0) == "https://x"
    assert objects.made["body"]["spec"] == {"clusterName": "maze-s1-abc"}
    assert objects.made["plural"] == "raydashboardconnections"


def test_without_an_operator_the_other_way_is_said(studio: ModuleType) -> None:
    with pytest.raises(SystemExit, match="kubectl -n team port-forward svc/maze-head-svc 8265"):
        studio.dashboard_url(Objects(99), "maze", "team", tries=2, look_seconds=0)


def test_the_cluster_of_the_newest_job(studio: ModuleType) -> None:
    store = Store()
    kube = MemoryKube(store)
    for number in (1, 2):
        job = rendered(kubernetes_config("run.name=maze"), number)["RayJob"]
        job["metadata"]["creationTimestamp"] = f"2026-01-0{number}T00:00:00Z"
        store.seed({**job, "status": {"rayClusterName": f"maze-s{number}-xyz"}})
    assert studio.ray_cluster_of(kube, "maze") == "maze-s2-xyz"
    with pytest.raises(SystemExit, match="no Ray cluster of other"):
        studio.ray_cluster_of(kube, "other", wait_seconds=0)


def test_submitting_checks_first_and_stops_where_that_fails(
    studio: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def argusrl(words: list[str]) -> int:
        calls.append(words)
        return 0

    monkeypatch.setattr(studio, "argusrl", argusrl)
    assert studio.submit(str(RECIPE), "run.name=maze") == ("maze", "default")
    assert [words[1] for words in calls] == ["manifest", "submit"]
    assert "--live" in calls[0]
    assert Path(calls[0][-1]).is_absolute()  # nobody's run.yaml is overwritten
    monkeypatch.setattr(studio, "argusrl", lambda words: 7)
    with pytest.raises(SystemExit, match="7"):
        studio.submit(str(RECIPE))


def test_help_and_mistakes_are_told_in_words(studio: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert studio.main(["--help"]) == 0
    assert "python examples/studio_submit.py" in capsys.readouterr().out
    assert studio.main([]) == 2
    capsys.readouterr()
    assert studio.main(["no/such.yaml"]) == 2
    assert "error: no such recipe: " in capsys.readouterr().err
