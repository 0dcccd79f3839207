"""What does not fit, and the change that helps."""

from __future__ import annotations

import re
from typing import Any

import pytest
from planned import mazes, planned

from argusrl.cluster.plan.knobs import changes_for
from argusrl.cluster.plan.limits import Limit
from argusrl.cluster.plan.plan import fix_of


@pytest.mark.parametrize(
    ("changes", "kind", "knob"),
    [
        (("engine.gpu_memory_share=0.1",), "engine share", "engine.gpu_memory_share=0.3"),
        (("engine.cache_bytes=1048576",), "cache", "engine.cache_bytes="),
        (("engine.gpu_memory_share=1.0",), "rollout", "engine.gpu_memory_share=0.9"),
        (("training.gradient_checkpointing=false",), "training", "training.gradient_checkpointing=true"),
        (("training.micro_batch_tokens=400000",), "training", "training.micro_batch_tokens="),
        (("cluster.slots=7",), "slots", "cluster.slots=6"),
    ],
)
def test_a_failing_limit_and_the_key_that_moves_it(changes: tuple[str, ...], kind: str, knob: str) -> None:
    plan = planned(*changes)
    assert plan.fits is False
    assert plan.failing[0].kind == kind
    fix = fix_of(plan)
    assert fix is not None
    assert fix.changes[0].startswith(knob)
    assert planned(*changes, *fix.changes).fits is (fix.then == "")


def test_what_fits_needs_no_fix() -> None:
    plan = planned()
    assert plan.fits is True
    assert fix_of(plan) is None


def test_the_volume_and_the_head_are_limits_with_values_that_would_fit() -> None:
    small = (
        "cluster.kubernetes.head.memory=1Gi",
        "cluster.kubernetes.volume.capacity=1200Gi",
        "algorithm.num_steps=4000",
    )
    plan = planned(*small, assume=("encoded_pixel_bytes=1",))
    assert [limit.kind for limit in plan.failing] == ["head", "capacity"]
    fix = fix_of(plan)
    assert fix is not None
    assert fix.changes == ("cluster.kubernetes.head.memory=3Gi",)
    assert "run folder" in fix.then
    rest = planned(*small, *fix.changes, assume=("encoded_pixel_bytes=1",))
    again = fix_of(rest)
    assert again is not None
    assert again.changes[0].startswith("cluster.kubernetes.volume.capacity=")
    assert again.then == ""
    assert planned(*small, *fix.changes, *again.changes, assume=("encoded_pixel_bytes=1",)).fits


def test_checkpoints_that_take_longer_than_a_step_are_written_less_often() -> None:
    plan = planned(
        "cluster.kubernetes.volume.throughput_mb_per_tib=1",
        "checkpoint.every_steps=1",
        assume=("response_share=0.01", "turn_share=0"),
    )
    assert [limit.kind for limit in plan.failing] == ["checkpoint"]
    fix = fix_of(plan)
    assert fix is not None
    assert fix.changes[0].startswith("checkpoint.every_steps=")


def test_where_no_key_helps_another_instance_is_named() -> None:
    plan = planned("cluster.slots=8", instance="ml.g6.48xlarge", nodes=1, assume=("cuda_context_bytes=6e9",))
    fix = fix_of(plan)
    assert fix is not None
    assert fix.changes[0].startswith("--instance ml.")


OWN = "cluster.kubernetes.workers.instance=ml.g7e.12xlarge"


@pytest.mark.parametrize("changes", [(), ("cluster.kubernetes.workers.gpus=2",)])
def test_pods_below_their_node_get_more_of_its_memory(changes: tuple[str, ...]) -> None:
    """The node has it: only the recipe asks for less."""
    plan = planned(OWN, "cluster.kubernetes.workers.memory=40Gi", *changes)
    assert plan.failing[0].kind == "worker"
    fix = fix_of(plan)
    assert fix is not None
    (change,) = fix.changes
    assert re.fullmatch(r"cluster\.kubernetes\.workers\.memory=\d+Gi", change)
    assert fix.then == ""
    assert planned(OWN, *changes, change).fits


def test_pods_never_get_more_memory_than_their_node_has() -> None:
    """Beyond that, nodes of another type are named with what goes with the old ones."""
    small = ("cluster.kubernetes.workers.memory=40Gi", "cluster.slots=8")
    for needed in (80 << 30, 400 << 30, 470 << 30):
        limit = Limit(kind="worker", what="host memory", needed=needed, available=40 << 30, unit="bytes")
        found = list(changes_for(limit, mazes(OWN, *small), 8))
        sizes = [one for one in found if one[0].startswith("cluster.kubernetes.workers.memory=")]
        expected = [-(-needed * 6 // 5 >> 30)] if needed < 390 << 30 else []
        assert [one[0].partition("=")[2] for one in sizes] == [*(f"{size}Gi" for size in expected), "null"]
        other = [one for one in found if one[0].startswith("--instance")]
        assert other
        assert all(one[1:] == ("cluster.kubernetes.workers.memory=null",) for one in other)


@pytest.mark.parametrize("slots", ["12", "null"])
def test_fleets_that_fit_the_same_nodes_come_before_other_nodes(slots: str) -> None:
    """8.8 B parameters and two CUDA contexts are too much for 22.4 GiB, and one of them is not."""
    nodes: dict[str, Any] = {"instance": "ml.g5.12xlarge", "nodes": 3}
    plan = planned(f"cluster.slots={slots}", "model.max_tokens=8192", **nodes)
    assert plan.failing[0].kind == "engine share"
    fix = fix_of(plan)
    assert fix is not None
    assert fix.changes[:2] == ("cluster.colocate=false", "cluster.engines=6")
    assert ("cluster.slots=12" in fix.changes) is (slots == "null")
    assert fix.then == ""
    assert planned(f"cluster.slots={slots}", "model.max_tokens=8192", *fix.changes, **nodes).fits


def test_an_engine_has_no_more_gpus_than_its_bundle() -> None:
    """Halves of twelve engines on twelve GPUs are two for each GPU, and Ray shows an engine one of them."""
    plan = planned("engine.tensor_parallel=2")
    (limit,) = plan.failing
    assert (limit.kind, limit.needed, limit.available) == ("engine GPUs", 2, 1)
    assert "engine.tensor_parallel" in str(limit)
    fix = fix_of(plan)
    assert fix is not None
    assert fix.changes == ("engine.tensor_parallel=1",)
    assert fix.then == ""
