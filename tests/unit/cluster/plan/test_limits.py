"""What does not fit, and the change that helps."""

from __future__ import annotations

import pytest
from planned import planned

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
