"""The pure parts of a step: advantages, plan, what ranks are told, what the commit names."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from argusrl.algorithms.packing import Plan
from argusrl.config.load import load_config
from argusrl.training.canary import Verification
from argusrl.training.rank_worker import UpdateReport
from argusrl.training.rollout import RolloutResult
from argusrl.training.step import (
    Clock,
    advantages_of,
    journalled,
    orders_of,
    plan_of,
    recheck_if_due,
    reference_of,
    replay_orders,
    step_metrics,
)
from argusrl.types import EpisodeFailure, TrajectoryKey, TrajectoryRef
from fakes.run_folder import RunBuilder

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


def trajectory(prompt: str, sample: int, reward: float, tokens: int = 10) -> TrajectoryRef:
    return TrajectoryRef(
        key=TrajectoryKey(1, prompt, sample),
        segment="trajectories/000001/w0.e0001.seg",
        offset=64 * sample,
        length=64,
        reward=reward,
        rewards={"exact": reward},
        prompt_tokens=tokens,
        response_tokens=5,
        image_patches=4,
        truncated=False,
    )


STEP = [
    trajectory(prompt, sample, float(sample == index)) for index, prompt in enumerate("abcd") for sample in range(4)
]


def planned(ranks: int, *overrides: str) -> Plan:
    config = load_config(RECIPE, ["algorithm.updates_per_step=2", *overrides]).config
    run = SimpleNamespace(config=config, workers=SimpleNamespace(ranks=SimpleNamespace(members=[None] * ranks)))
    run.isolated_step = None
    return plan_of(STEP, advantages_of(STEP, "group_std"), run, 1)


def test_advantages_are_of_the_group_and_not_of_the_order():
    mixed = [STEP[index] for index in (5, 0, 9, 1, 4, 2, 8, 3, 6, 7, 10, 11)]
    by_key = dict(zip([t.key for t in mixed], advantages_of(mixed, "group_std"), strict=True))
    assert [by_key[t.key] for t in STEP[:12]] == advantages_of(STEP[:12], "group_std")
    assert sum(advantages_of(STEP[:4], "group_mean")) == pytest.approx(0)
    assert advantages_of([trajectory("e", n, 1.0) for n in range(4)], "group_std") == [0.0] * 4


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tokens", [16, 1000])
def test_every_row_is_told_to_one_rank_in_one_update(ranks, tokens):
    plan = planned(ranks, f"training.micro_batch_tokens={tokens}")
    orders = orders_of(plan, STEP, advantages_of(STEP, "group_std"))
    assert len(orders) == ranks
    assert {len(updates) for updates in orders} == {2}
    told = [row for updates in orders for update in updates for batch in update.micro_batches for row in batch]
    assert sorted(row.reference.key for row in told) == sorted(t.key for t in STEP)
    groups = [
        {row.reference.key.prompt_id for updates in orders for batch in updates[n].micro_batches for row in batch}
        for n in range(2)
    ]
    assert not groups[0] & groups[1]
    for number in range(2):  # collectives: every rank makes as many passes, and divides by the same
        assert len({len(updates[number].micro_batches) for updates in orders}) == 1
        assert {updates[number].denominator_tokens for updates in orders} == {40}


def test_a_committed_step_is_done_again_on_its_ranks_or_emulated_on_another_number():
    plan = planned(2)
    advantages = advantages_of(STEP, "group_std")
    commit = SimpleNamespace(plan=plan.to_json())
    same = replay_orders(run_with_ranks(2), commit, STEP, advantages)
    assert same == orders_of(plan, STEP, advantages)
    (alone,) = replay_orders(run_with_ranks(1), commit, STEP, advantages)
    for number, update in enumerate(alone):
        assert update.recorded_ranks == tuple(rank[number].micro_batches for rank in same)
        assert update.denominator_tokens == same[0][number].denominator_tokens
    assert replay_orders(run_with_ranks(4), commit, STEP, advantages) == [alone] * 4


def rechecked(rewards: list[float], ranks: int) -> list[list]:
    """What each rank is asked to compute once more after a step with a group for every reward that varies."""
    rows = [trajectory(f"p{i}", sample, value * sample) for i, value in enumerate(rewards) for sample in range(2)]
    run = run_with_ranks(ranks)
    asked: list[list] = []

    async def recheck(orders):
        asked.extend(orders)
        return True

    run.config = load_config(RECIPE, ["training.recheck_every_steps=1"]).config
    run.workers.ranks.recheck, run.isolated_step = recheck, None
    advantages = advantages_of(rows, "group_std")
    asyncio.run(recheck_if_due(run, 1, orders_of(plan_of(rows, advantages, run, 1), rows, advantages)))
    return asked


def test_a_step_in_which_no_group_has_a_signal_has_nothing_to_recheck():
    assert rechecked([0.0, 0.0], ranks=1) == []


def test_a_rank_without_rows_rechecks_those_of_another_so_that_all_act_together():
    first, second, third = rechecked([1.0], ranks=3)  # two rows
    assert third == first != second
    assert len(third) == 1


def run_with_ranks(ranks: int):
    return SimpleNamespace(workers=SimpleNamespace(ranks=SimpleNamespace(members=[None] * ranks)))


def test_the_commit_names_what_a_replay_needs(tmp_path):
    builder = RunBuilder(tmp_path)
    journals = [builder.journal(1, writer) for writer in ("w0", "w1")]
    references = [builder.play(journal, prompt, 0) for journal, prompt in zip(journals, "ab", strict=True)]
    sealed = tuple(journal.seal() for journal in journals)
    rollout = RolloutResult(
        trajectories=tuple(reversed(references)), failures=(), sealed=sealed, adopted=0, sampled_tokens=6
    )
    commit = msgspec.structs.replace(builder.commit(1, [], []), **journalled(rollout))
    for number, reference in enumerate(reversed(references)):
        again = reference_of(commit, number)
        assert (again.key, again.segment, again.offset, again.length, again.reward) == (
            reference.key,
            reference.segment,
            reference.offset,
            reference.length,
            reference.reward,
        )


def test_a_step_without_trajectories_has_a_plan_that_does_nothing():
    config = load_config(RECIPE, []).config
    run = SimpleNamespace(config=config, isolated_step=None, **vars(run_with_ranks(2)))
    orders = orders_of(plan_of([], [], run, 1), [], [])
    assert len(orders) == 2
    assert all(update.micro_batches == () for updates in orders for update in updates)


def metrics_of(trajectories: list[TrajectoryRef], failures: int = 0) -> dict:
    clock = Clock()
    for name in ("rollout", "plan", "checkpoint", "train", "sync"):
        clock.lap(name)
    clock.seconds["rollout"] = 2.0
    key = TrajectoryKey(1, "z", 0)
    failure = EpisodeFailure(key=key, kind="reward", source="judge", message="503")
    rollout = RolloutResult(
        trajectories=tuple(trajectories),
        failures=(failure,) * failures,
        sealed=(),
        adopted=1,
        sampled_tokens=30,
        play_seconds=2.0,
    )
    synced = SimpleNamespace(
        adapter=SimpleNamespace(version=4, sha256="abc"),
        verification=Verification(gap=0.25, by_effect=True),
        handover_seconds=0.05,
        storage_reads=1,
        engine_bytes=7 << 20,
    )
    report = UpdateReport(skipped=1, metrics={"policy/grad_norm": 0.5}, own_seconds=0.01)
    return step_metrics(
        rollout, advantages_of(trajectories, "group_std"), {"rollout/cached_prompt_share": 0.75}, report, synced, clock
    )


def test_the_metrics_of_a_step():
    flat = [trajectory("e", sample, 0.0, tokens=30) for sample in range(4)]
    metrics = metrics_of([*STEP[:4], *flat], failures=2)
    assert metrics["reward/mean"] == metrics["reward/exact/mean"] == 0.125
    assert metrics["reward/std"] == pytest.approx((7 / 64) ** 0.5 * (8 / 7) ** 0.5)
    assert metrics["rollout/tokens_per_second"] == 15.0
    assert metrics["rollout/prompt_tokens_mean"] == 20.0
    assert metrics["rollout/groups_without_signal"] == 1
    counted = ("rollout/trajectories", "rollout/failed_trajectories", "rollout/adopted_trajectories")
    assert [metrics[name] for name in counted] == [8, 2, 1]
    assert (metrics["policy/grad_norm"], metrics["policy/skipped_updates"]) == (0.5, 1)
    assert (metrics["adapter/version"], metrics["adapter/canary_gap"]) == (4, 0.25)
    assert (metrics["adapter/handover_seconds"], metrics["adapter/storage_reads"]) == (0.05, 1)
    assert metrics["rollout/cached_prompt_share"] == 0.75


def test_the_metrics_of_a_step_in_which_all_failed_are_numbers():
    metrics = metrics_of([], failures=4)
    assert all(math.isfinite(value) for value in metrics.values() if isinstance(value, float))
    assert (metrics["reward/mean"], metrics["rollout/failed_trajectories"]) == (0.0, 4)
