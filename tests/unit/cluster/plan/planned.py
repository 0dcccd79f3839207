"""Plans for tests: a job of mazes on three small nodes, and changes to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argusrl.cluster.plan.assumptions import Assumptions
from argusrl.cluster.plan.machine import machine_of
from argusrl.cluster.plan.plan import Plan, make_plan
from argusrl.config.load import with_overrides
from argusrl.config.model_shape import ModelShape
from argusrl.config.sections import Config
from argusrl.config.validate import validate

QUICKSTART = Path(__file__).parents[4] / "recipes" / "quickstart.yaml"
INSTANCE = "ml.g7e.12xlarge"

MAZES: dict[str, Any] = {
    "run": {"name": "mazes", "root": "/fsx/runs"},
    "model": {"path": "/fsx/models/Qwen3-VL-8B-Instruct", "max_tokens": 16_384, "max_pixels": 262_144},
    "data": {"kind": "environment", "train_size": 256, "heldout_size": 64},
    "environment": {"kind": "python", "factory": "mazes:Maze", "max_turns": 15},
    "rewards": [{"kind": "environment"}],
    "algorithm": {"num_steps": 160, "prompts_per_step": 64, "group_size": 8},
    "rollout": {"max_response_tokens": 512, "max_prompt_tokens": 2048},
    "cluster": {
        "address": "auto",
        "device": "cuda",
        "slots": 6,
        "episode_workers": 6,
        "kubernetes": {"image": "some/image", "volume": {"capacity": "4800Gi"}},
    },
    "checkpoint": {"keep": 3},
}


def mazes(*changes: str) -> Config:
    """The recipe with changes."""
    return with_overrides(validate(MAZES), changes)


def planned(
    *changes: str, instance: str = INSTANCE, nodes: int = 3, assume: tuple[str, ...] = (), typical: bool = False
) -> Plan:
    """Of Qwen3-VL-8B on six GPUs of 96 GiB."""
    config = mazes(*changes)
    machine = machine_of(config, instance_name=instance, nodes=nodes)
    shape = ModelShape.find(config.model.path)
    return make_plan(config, shape, machine, Assumptions().with_values(assume), typical=typical)
