"""One GRPO step. Each line of run_step is one call into one package; docs/architecture.md has the picture."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from argusrl.algorithms.advantages import group_advantages
from argusrl.algorithms.packing import Plan, RowCost, plan_step
from argusrl.errors import WorkerError
from argusrl.journal.commits import Commit, CommittedTrajectory
from argusrl.journal.segments import SealedSegment
from argusrl.training.canary import Verification
from argusrl.training.engine_worker import EngineProof
from argusrl.training.rank_worker import RankUpdate, RowOrder, UpdateReport
from argusrl.training.rollout import RolloutResult, both
from argusrl.training.run import Run, Serving
from argusrl.types import AdapterRef, TrajectoryRef


async def run_step(run: Run, step: int) -> Commit:
    """Rollout, advantages, plan, updates, publication, commit. Returns the durable commit."""
    clock = Clock()
    run.workers.position.step, run.workers.position.ahead = step, 0
    rollout = await run.rollout(step)
    clock.lap("rollout")
    run.at("rollout_done")
    advantages = advantages_of(rollout.trajectories, run.config.algorithm.advantage)
    plan = plan_of(rollout.trajectories, advantages, run, step)
    run.phase("train")
    await run.colocation.to_training()
    orders = orders_of(plan, rollout.trajectories, advantages)
    clock.lap("plan")
    await run.staged()
    clock.lap("checkpoint")
    run.read_ahead()
    run.settled = False
    run.at("training")
    report, engine_work = await both(run.workers.ranks.update(orders), run.engine_work())
    run.at("updated")
    await recheck_if_due(run, step, orders)
    clock.lap("train")
    run.phase("sync")
    synced = await synchronise(run, version=step)
    clock.lap("sync")
    run.phase("commit")
    run.at("committing")
    committing = time.monotonic()
    commit = run.chain.append(
        Commit(
            step=step,
            epoch=run.epoch.number,
            outcome="skipped" if report.skipped == len(plan.updates) else "updated",
            adapter=synced.adapter,
            state_digest=synced.state_digest,
            config_sha256=run.config_sha256,
            **journalled(rollout),
            algorithm_state=run.state.after(synced.canary),
            prompt_position=run.state.prompt_position + run.config.algorithm.prompts_per_step,
            plan=plan.to_json(),
            conditions=run.conditions,
            metrics=step_metrics(rollout, advantages, engine_work, report, synced, clock),
        )
    )
    run.commit_seconds = time.monotonic() - committing
    run.at("committed")
    run.checkpoint(commit)
    return commit


async def recheck_if_due(run: Run, step: int, orders: Sequence[list[RankUpdate]]) -> None:
    """Now and then compute one micro-batch on another rank: bits that differ are silent corruption."""
    every = run.config.training.recheck_every_steps
    if not every or step % every:
        return
    firsts = [list(batch[:1]) for updates in orders for batch in updates[0].micro_batches[:1] if batch]
    if not firsts:  # no group of the step has a signal
        return
    if not await run.workers.ranks.recheck([firsts[rank % len(firsts)] for rank in range(len(orders))]):
        raise WorkerError(
            f"step {step}: a sample has other log-probabilities when it is computed again: silent corruption",
            "the step is done again from the last commit; if this repeats, a device is broken",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """A durable adapter that all engines proved."""

    adapter: AdapterRef
    canary: Sequence[float]  # [R] log-probabilities of the trainer
    state_digest: str  # logical digest of adapter, Adam and RNG
    verification: Verification
    handover_seconds: float  # from the end of the updates until it was proven everywhere
    storage_reads: int  # of adapters, by engines, since the version before
    engine_bytes: int = 0  # largest peak of an engine


async def synchronise(run: Run, version: int) -> Synced:
    """Publish the adapter, hand the memory to the engines, load it everywhere, and prove it. Raises AdapterRefused.

    Engines load from memory; meanwhile the folder is written and the trainer's state is hashed.
    """
    began = time.monotonic()
    ranks, engines = run.workers.ranks, run.workers.engines
    adapter, files = await ranks.publish(version)
    run.at("staged")
    engines.memory.hold(adapter, files)
    canary, _ = await both(ranks.canary(), run.colocation.to_sync())  # ranks take calls in this order

    async def prove() -> tuple[Verification, float]:
        return await serve(run, Serving(adapter, canary)), time.monotonic() - began

    async def digest() -> str:
        found = await ranks.state_digest()
        await ranks.published()
        run.at("published")
        return found

    (verification, seconds), state_digest = await both(prove(), digest())
    engines.memory.forget()
    run.at("synced")
    return Synced(
        adapter=adapter,
        canary=canary,
        state_digest=state_digest,
        verification=verification,
        handover_seconds=seconds,
        storage_reads=engines.memory.take_reads(),
        engine_bytes=run.engine_bytes,
    )


async def serve(run: Run, *versions: Serving) -> Verification:
    """Have the engines, which own the memory, load and prove adapters, the newest one last. Raises AdapterRefused.

    An engine that is lost on the way is replaced, and proves what it has to serve first; one must be left.
    """
    engines = run.workers.engines
    for one in versions:
        run.serve_too(one)
        await engines.load_adapter(one.adapter)
    await run.colocation.to_rollout()
    for one in versions:
        proofs: list[EngineProof] = []
        while not proofs:
            await run.unless_stopped(engines.someone(run.config.cluster.start_timeout_seconds))
            proofs = await engines.prove(one.adapter.version)
        verification = run.verify(one.adapter, proofs, one.canary)
        run.engine_bytes = max(proof.peak_bytes for proof in proofs)
    return verification


def advantages_of(trajectories: Sequence[TrajectoryRef], kind: Literal["group_std", "group_mean"]) -> list[float]:
    """One advantage per trajectory, relative to its group."""
    groups: dict[str, list[int]] = {}
    for row, trajectory in enumerate(trajectories):
        groups.setdefault(trajectory.key.prompt_id, []).append(row)
    advantages = [0.0] * len(trajectories)
    for rows in groups.values():
        for row, value in zip(rows, group_advantages([trajectories[i].reward for i in rows], kind), strict=True):
            advantages[row] = value
    return advantages


def plan_of(trajectories: Sequence[TrajectoryRef], advantages: Sequence[float], run: Run, step: int) -> Plan:
    """Spread the step's rows over updates, ranks and micro-batches."""
    rows = [
        RowCost(
            group=trajectory.key.prompt_id,
            tokens=trajectory.prompt_tokens + trajectory.response_tokens,
            response_tokens=trajectory.response_tokens,
            advantage=advantage,
            prompt_tokens=trajectory.first_prompt_tokens,
            image_patches=trajectory.image_patches,
        )
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
    ]
    return plan_step(
        rows,
        ranks=len(run.workers.ranks.members),
        updates=run.config.algorithm.updates_per_step,
        micro_batch_tokens=1 if run.isolated_step == step else run.config.training.micro_batch_tokens,
        idle_without_signal=run.config.algorithm.kl_weight == 0,
    )


def orders_of(plan: Plan, trajectories: Sequence[TrajectoryRef], advantages: Sequence[float]) -> list[list[RankUpdate]]:
    """What each rank is told: places of its rows and their advantages, per update."""

    def batch(rows: Sequence[int]) -> tuple[RowOrder, ...]:
        return tuple(RowOrder(reference=trajectories[row], advantage=advantages[row]) for row in rows)

    ranks = len(plan.updates[0].ranks)
    return [
        [
            RankUpdate(
                micro_batches=tuple(batch(rows) for rows in update.ranks[rank]),
                denominator_tokens=update.denominator_tokens,
            )
            for update in plan.updates
        ]
        for rank in range(ranks)
    ]


def journalled(rollout: RolloutResult) -> dict[str, Any]:
    """The parts of a commit that name what the step consists of."""
    segments: list[SealedSegment] = [segment for sealed in rollout.sealed for segment in sealed.segments]
    index = {segment.path: number for number, segment in enumerate(segments)}
    return {
        "segments": tuple(segments),
        "trajectories": tuple(
            CommittedTrajectory(
                key=trajectory.key,
                segment=index[trajectory.segment],
                offset=trajectory.offset,
                length=trajectory.length,
                reward=trajectory.reward,
            )
            for trajectory in rollout.trajectories
        ),
        "failures": rollout.failures,
    }


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.started = self.last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = now - self.last
        self.last = now


def step_metrics(
    rollout: RolloutResult,
    advantages: Sequence[float],
    engine_work: Mapping[str, float],
    report: UpdateReport,
    synced: Synced,
    clock: Clock,
) -> dict[str, Any]:
    """The scalars of a step; names, units and meaning are declared in observe/metrics.py."""
    trajectories = rollout.trajectories
    rewards = [trajectory.reward for trajectory in trajectories]
    count = max(1, len(trajectories))
    mean = math.fsum(rewards) / count
    response_tokens = sum(trajectory.response_tokens for trajectory in trajectories)
    groups: dict[str, bool] = {}
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        groups[trajectory.key.prompt_id] = groups.get(trajectory.key.prompt_id, False) or advantage != 0.0
    names = sorted({name for trajectory in trajectories for name in trajectory.rewards})
    metrics: dict[str, Any] = {
        "reward/mean": mean,
        "reward/std": math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)),
        **{f"reward/{name}/mean": math.fsum(t.rewards[name] for t in trajectories) / count for name in names},
        "rollout/tokens_per_second": rollout.sampled_tokens / max(rollout.play_seconds, 1e-9),
        "rollout/trajectories": len(trajectories),
        "rollout/failed_trajectories": len(rollout.failures),
        "rollout/adopted_trajectories": rollout.adopted,
        "rollout/truncated_share": sum(trajectory.truncated for trajectory in trajectories) / count,
        "rollout/response_tokens_mean": response_tokens / count,
        "rollout/prompt_tokens_mean": sum(trajectory.prompt_tokens for trajectory in trajectories) / count,
        **engine_work,
        "rollout/groups_without_signal": sum(not signal for signal in groups.values()),
        "rollout/seal_seconds": rollout.seal_seconds,
        "time/rollout_seconds": clock.seconds["rollout"],
        "time/plan_seconds": clock.seconds["plan"],
        "time/checkpoint_seconds": clock.seconds["checkpoint"],
        "time/train_seconds": clock.seconds["train"],
        "time/sync_seconds": clock.seconds["sync"],
        "time/step_seconds": time.monotonic() - clock.started,
        **report.metrics,
        "policy/skipped_updates": report.skipped,
        "adapter/version": synced.adapter.version,
        "adapter/sha256": synced.adapter.sha256,
        "adapter/handover_seconds": synced.handover_seconds,
        "adapter/storage_reads": synced.storage_reads,
        "adapter/canary_gap": synced.verification.gap,
        "adapter/proven_by_effect": float(synced.verification.by_effect),
        "memory/driver_bytes": driver_bytes(),
        "memory/rank_bytes": report.peak_bytes,
        "memory/engine_bytes": synced.engine_bytes,
    }
    return metrics


def driver_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def replay_orders(
    run: Run, commit: Commit, trajectories: Sequence[TrajectoryRef], advantages: Sequence[float]
) -> list[list[RankUpdate]]:
    """What each rank is told to do a committed step again; on another number of ranks all emulate the recorded ones."""
    recorded = orders_of(Plan.from_json(commit.plan), trajectories, advantages)
    ranks = len(run.workers.ranks.members)
    if len(recorded) == ranks:
        return recorded
    emulated = [
        RankUpdate(
            micro_batches=(),
            denominator_tokens=of_one_update[0].denominator_tokens,
            recorded_ranks=tuple(own.micro_batches for own in of_one_update),
        )
        for of_one_update in zip(*recorded, strict=True)
    ]
    return [emulated] * ranks


def reference_of(commit: Commit, number: int) -> TrajectoryRef:
    """Where trajectory `number` of a commit lies; token counts are not needed to train on it again."""
    trajectory = commit.trajectories[number]
    return TrajectoryRef(
        key=trajectory.key,
        segment=commit.segments[trajectory.segment].path,
        offset=trajectory.offset,
        length=trajectory.length,
        reward=trajectory.reward,
        rewards={},
        prompt_tokens=0,
        response_tokens=0,
        image_patches=0,
        truncated=False,
    )
