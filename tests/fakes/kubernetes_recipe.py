"""A recipe with a Kubernetes section, and a way into what is rendered from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argusrl.cluster.manifests.render import render
from argusrl.config.load import load_config
from argusrl.config.sections import Config

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "qwen3vl_8b_hyperpod.yaml"

KUBERNETES = "cluster.kubernetes"


def kubernetes_config(*overrides: str, **section: object) -> Config:
    """The reference recipe; keyword arguments are keys of its section cluster.kubernetes."""
    values = [f"{KUBERNETES}.{key.replace('__', '.')}={value}" for key, value in section.items()]
    return load_config(RECIPE, [*overrides, *values]).config


def rendered(config: Config, submission: int = 1) -> dict[str, dict[str, Any]]:
    """Kind → object."""
    return {document.kind: document.value for document in render(config, submission)}


def ray_job(*overrides: str, **section: object) -> dict[str, Any]:
    """The RayJob."""
    return rendered(kubernetes_config(*overrides, **section))["RayJob"]


def head_and_worker(job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pod templates."""
    cluster = job["spec"]["rayClusterSpec"]
    return cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]


def variables(template: dict[str, Any]) -> dict[str, Any]:
    """Environment of the Ray container: value, or where it comes from."""
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in template["spec"]["containers"][0]["env"]}
