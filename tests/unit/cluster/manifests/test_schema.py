from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from argusrl.cluster.manifests.operator_rules import MANAGERS
from argusrl.cluster.manifests.render import render
from argusrl.cluster.manifests.schema import (
    ray_cluster_schema,
    ray_job_schema,
    schema_problems,
    unknown_fields,
    with_defaults,
)
from fakes.kubernetes_recipe import ROOT, kubernetes_config, ray_job

CRDS = ROOT.parent / "shared" / "cluster" / "crds"
SHIPPED = ROOT / "src" / "argusrl" / "cluster" / "manifests" / "kuberay_v1.json.gz"


def script() -> ModuleType:
    """scripts/write_crd_schema.py."""
    spec = importlib.util.spec_from_file_location("write_crd_schema", ROOT / "scripts" / "write_crd_schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["write_crd_schema"] = module
    spec.loader.exec_module(module)
    return module


def crd_of(version: str) -> Path:
    path = CRDS / f"kuberay-{version}" / "ray.io_rayjobs.yaml"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return path


def test_the_shipped_schema_is_that_of_the_crd() -> None:
    written = script().compact(crd_of("v1.7.0"), "v1.7.0")
    assert gzip.decompress(written) == gzip.decompress(SHIPPED.read_bytes())


@pytest.mark.parametrize("version", ["v1.7.0", "v1.6.2"])
def test_our_jobs_are_valid_for_this_operator(version: str) -> None:
    crd = yaml.load(crd_of(version).read_text(), Loader=yaml.CSafeLoader)
    schema = script().schema_of(crd)
    job = render(kubernetes_config())[-1].value
    filled = with_defaults(job, schema)
    assert schema_problems(filled, schema) == []
    assert list(unknown_fields(filled, {**schema, "properties": {**schema["properties"], "metadata": {}}})) == []


def test_descriptions_go_and_a_field_called_description_stays() -> None:
    schema = {
        "description": "all of it",
        "properties": {"description": {"type": "string", "description": "text"}, "properties": {"properties": {}}},
    }
    found = script()._without_descriptions(schema, names=False)
    assert found == {"properties": {"description": {"type": "string"}, "properties": {"properties": {}}}}


def test_every_rule_of_the_crd_is_known() -> None:
    """CEL rules are ported by hand: one that is new in a CRD has to be ported, too."""
    rules: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            rules.update(rule["rule"] for rule in value.get("x-kubernetes-validations", []))
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(ray_job_schema())
    managers = ", ".join(f"'{name}'" for name in MANAGERS)
    assert rules == {
        "self == oldSelf",  # of updates, which are none of ours
        f"self in [{managers}]",
        "!(has(self.jobStatus) && has(self.jobDeploymentStatus))",
        "has(self.jobStatus) || has(self.jobDeploymentStatus)",
        "!((has(self.onSuccess) || has(self.onFailure)) && has(self.deletionRules))",
        "((has(self.onSuccess) && has(self.onFailure)) || has(self.deletionRules))",
    }


def test_defaults_are_filled_in_and_nothing_given_is_changed() -> None:
    job = ray_job()
    before = json.dumps(job)
    filled = with_defaults(
        {"spec": {"rayClusterSpec": {"workerGroupSpecs": [{"groupName": "w", "template": {}}]}}}, ray_job_schema()
    )
    (group,) = filled["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["maxReplicas"], group["replicas"]) == (0, 2147483647, 0)
    assert filled["spec"]["submissionMode"] == "K8sJobMode"
    with_defaults(job, ray_job_schema())
    assert json.dumps(job) == before


def test_a_ray_cluster_has_the_spec_of_a_jobs_cluster() -> None:
    spec = ray_job()["spec"]["rayClusterSpec"]
    cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "x"}, "spec": spec}
    schema = ray_cluster_schema()
    assert schema_problems(with_defaults(cluster, schema), schema) == []
    assert list(unknown_fields({"spec": {"headGrupSpec": {}}}, schema)) == [
        "spec.headGrupSpec: there is no such field; did you mean headGroupSpec?"
    ]
