from __future__ import annotations

from typing import Any

import pytest

from argusrl.config.load import with_overrides
from argusrl.config.sections import Config
from argusrl.config.validate import validate
from argusrl.training.joined import machine_of_nodes

GIB = 1 << 30
HEAD = {"Alive": True, "Resources": {"memory": 8.0 * GIB, "object_store_memory": 1.0 * GIB}}
GONE = {"Alive": False, "Resources": {"GPU": 8.0, "memory": 1.0, "object_store_memory": 1.0}}


def recipe(*changes: str) -> Config:
    values: dict[str, Any] = {
        "model": {"path": "some/model"},
        "data": {"kind": "generated", "generator": "task.py:make", "train_size": 8, "heldout_size": 4},
        "rewards": [{"kind": "exact"}],
        "cluster": {"address": "auto"},
    }
    return with_overrides(validate(values), changes)


def node(gpus: float, memory: float, kind: str = "H200") -> dict[str, Any]:
    resources = {"GPU": gpus, "CPU": 16.0, "memory": memory * GIB, "object_store_memory": 10.0 * GIB}
    return {"Alive": True, "Resources": resources | {f"accelerator_type:{kind}": 1.0}}


def test_nodes_with_gpus_are_the_workers() -> None:
    found = machine_of_nodes(recipe(), [HEAD, GONE, node(8, 900), node(8, 700)])
    assert (found.device, found.nodes, found.slots) == ("cuda", 2, 16)
    assert found.gpu_bytes == 141 * GIB
    assert found.node_bytes == 710 * GIB  # of the smallest, its object store included
    assert found.shared_memory_bytes == 10 * GIB


@pytest.mark.parametrize("kinds", [("A100", "H100"), ("Toaster", "H100")])
def test_the_smallest_gpu_counts_if_all_are_known(kinds: tuple[str, str]) -> None:
    found = machine_of_nodes(recipe(), [node(1, 100, kind) for kind in kinds])
    assert found.gpu_bytes == (80 * GIB if kinds[0] == "A100" else None)


def test_a_cluster_of_cpus() -> None:
    cpus = {"Alive": True, "Resources": {"CPU": 4.0, "memory": 20.0 * GIB, "object_store_memory": 2.0 * GIB}}
    found = machine_of_nodes(recipe("cluster.slots=3"), [HEAD, cpus, cpus])
    assert (found.device, found.nodes, found.slots_per_node) == ("cpu", 2, 2)
    assert found.gpu_bytes is None


def test_the_type_of_the_recipe_says_more() -> None:
    kubernetes = "cluster.kubernetes={image: some/image, workers: {instance: ml.g7e.12xlarge, nodes: 3}}"
    found = machine_of_nodes(recipe("run.root=/fsx/runs", kubernetes), [HEAD, node(2, 100)])
    assert found.instance == "ml.g7e.12xlarge"
    assert found.slots == 6
