"""Memory: devices, worker, head."""

from __future__ import annotations

import pytest
from planned import planned

from argusrl.cluster.plan.host import head_growth
from argusrl.cluster.plan.lines import PHASES, TRAINING

GIB = 2**30


def test_rank_and_engine_take_turns_on_a_gpu() -> None:
    (table,) = planned().devices
    sleeping = {line.name for line in table.lines if line.in_phase("backward")}
    awake = {line.name for line in table.lines if line.in_phase("rollout")}
    assert {"base weights", "activations", "gradients", "optimizer"} <= sleeping
    assert not {"engine weights", "KV cache", "adapter slots"} & sleeping
    assert {"engine weights", "KV cache"} <= awake
    assert not {"base weights", "optimizer"} & awake
    assert {"CUDA contexts", "NCCL buffers", "driver's reserve"} <= sleeping & awake


def test_a_line_is_what_its_formula_says() -> None:
    (table,) = planned().devices
    lines = {line.name: line for line in table.lines}
    base = lines["base weights"].inputs
    assert lines["base weights"].size == -(-base["frozen_parameters"] // base["ranks"]) * base["element_bytes"]
    optimizer = lines["optimizer"].inputs
    assert lines["optimizer"].size == 2 * 4 * -(-optimizer["trained_parameters"] // optimizer["ranks"])
    merged = planned("adapter.serving=merged")
    assert merged.devices[0].size("adapter slots") == 0
    assert merged.devices[0].size("merge of a layer") == 4096 * 12_288 * (3 * 4 + 2 * 2)
    assert merged.worker.size("pristine weights") == 2 * 6_945_767_424


def test_pages_that_the_kernel_takes_back_are_shown_and_not_counted() -> None:
    plain, merged = planned("adapter.serving=lora").worker, planned("adapter.serving=merged").worker
    assert merged.size("pristine weights") > 12 * GIB
    host_adapters = plain.size("adapters beside the device")
    assert merged.total("rollout") == plain.total("rollout") - host_adapters
    assert "pristine weights *" in merged.rows()


def test_separate_fleets_keep_their_gpus() -> None:
    plan = planned("cluster.colocate=false", "cluster.engines=3")
    rank, engine = plan.devices
    assert (rank.count, engine.count) == (3, 3)
    assert rank.size("engine weights") == engine.size("base weights") == 0
    assert all(line.in_phase("rollout") == line.size for line in engine.lines if line.name == "KV cache")
    assert plan.worker.size("sleeping engines' weights") == 0


def test_a_single_rank_gathers_nothing_over_a_network() -> None:
    plan = planned("cluster.slots=1", nodes=1)
    assert plan.devices[0].size("NCCL buffers") == 0
    assert plan.seconds is not None
    assert plan.seconds.gather == 0


def test_totals_are_sums_of_what_is_there_in_a_phase() -> None:
    plan = planned()
    for table in plan.tables:
        for phase in PHASES:
            there = [line.size for line in table.lines if phase in line.phases and not line.reclaimable]
            assert table.total(phase) == sum(there)
        assert table.peak()[1] == max(table.totals.values())
    (table,) = plan.devices
    assert table.peak(TRAINING)[0] in ("head", "backward", "tower")


def test_a_worker_holds_what_is_not_on_its_gpus() -> None:
    plan = planned()
    memory = plan.setting.estimate
    assert plan.worker.size("sleeping engines' weights") == 2 * memory.engine.weights  # two GPUs to a node
    assert plan.worker.size("ranks' shards while engines have the GPU") == 2 * memory.training.resident
    assert plan.worker.total("loading") > plan.worker.total("rollout")


def test_the_head_does_not_grow_with_images() -> None:
    small = planned("model.max_pixels=65536")
    large = planned("model.max_pixels=1048576")
    assert small.head is not None
    assert large.head is not None
    assert small.head.peak() == large.head.peak()
    grows = {one.per: one.size for one in head_growth(small.setting)}
    assert grows["image"] == 0
    assert grows["committed trajectory"] < grows["trajectory of the open step"]


@pytest.mark.parametrize("prompts", [64, 1024])
def test_the_driver_grows_with_trajectories(prompts: int) -> None:
    head = planned(f"algorithm.prompts_per_step={prompts}", "algorithm.num_steps=100").head
    assert head is not None
    line = next(line for line in head.lines if line.name == "driver")
    inputs = line.inputs
    assert inputs["open_trajectories"] == prompts * 8
    assert inputs["past_trajectories"] == 100 * prompts * 8
    grown = inputs["open_trajectories"] * inputs["open_trajectory_bytes"]
    grown += inputs["past_trajectories"] * inputs["past_trajectory_bytes"]
    assert line.size == inputs["driver_bytes"] + grown + 100 * 1024
