"""Seconds, fleets, storage."""

from __future__ import annotations

import pytest
from planned import planned


def test_decoding_is_bound_by_what_is_read() -> None:
    slow, fast = planned(), planned(instance="ml.p5en.48xlarge", nodes=1)
    assert slow.seconds is not None
    assert fast.seconds is not None
    assert fast.seconds.decode < slow.seconds.decode
    assert fast.seconds.train < slow.seconds.train


def test_twice_the_utilisation_is_half_the_time() -> None:
    once, twice = planned(), planned(assume=("training_utilisation=0.7", "prefill_utilisation=0.9"))
    assert once.seconds is not None
    assert twice.seconds is not None
    assert twice.seconds.train == pytest.approx(once.seconds.train / 2, rel=1e-6)
    assert twice.seconds.prefill == pytest.approx(once.seconds.prefill / 2, rel=1e-6)


def test_checkpointing_costs_a_forward() -> None:
    with_it, without = planned(), planned("training.gradient_checkpointing=false")
    assert with_it.seconds is not None
    assert without.seconds is not None
    assert 1.2 < with_it.seconds.train / without.seconds.train < 1.5


def test_fleets_are_compared_by_gpu_hours() -> None:
    plan = planned()
    together, apart, ahead = plan.fleets
    assert plan.seconds is not None
    assert together.step_seconds == pytest.approx(plan.seconds.step, abs=1e-3)
    assert together.gpu_hours == pytest.approx(plan.seconds.step * 6 * 1000 / 3600, abs=0.1)
    assert apart.ranks + apart.engines == ahead.ranks + ahead.engines == 6
    assert ahead.step_seconds < apart.step_seconds
    assert all(one.fits for one in plan.fleets)
    for one in plan.fleets:
        assert planned(*one.changes).fits


def test_the_file_system_sets_the_throughput() -> None:
    small = planned("cluster.kubernetes.volume.capacity=1200Gi").storage
    large = planned("cluster.kubernetes.volume.capacity=2400Gi").storage
    assert large.throughput == 2 * small.throughput
    faster = planned("cluster.kubernetes.volume.throughput_mb_per_tib=1000").storage
    assert faster.throughput == pytest.approx(0.8 * 4800 / 1024 * 1e9)


def test_retention_decides_what_stays() -> None:
    steps = "algorithm.num_steps=1000"
    all_kept, few = planned(steps).storage, planned(steps, "checkpoint.keep_trajectories=false").storage
    assert all_kept.item("images").kept == 1000 * all_kept.item("images").written
    assert few.item("images").kept < 0.01 * all_kept.item("images").kept
    adapter = planned(steps, "checkpoint.keep_adapters=5").storage.item("adapter")
    assert adapter.kept == 6 * adapter.written
    assert planned("checkpoint.every_steps=10").storage.item("checkpoint").written == pytest.approx(
        all_kept.item("checkpoint").written / 10
    )


def test_an_adapter_is_written_once_and_read_back_once() -> None:
    item = planned().storage.item("adapter")
    assert item.written == item.read == 4 * 87_293_952


def test_turns_end_where_a_sequence_is_full() -> None:
    plan = planned("model.max_tokens=4096")
    assert plan.workload.turns < 15
    assert plan.workload.trajectory_tokens <= 4096
    assert plan.workload.images == pytest.approx(plan.workload.turns - 1)
