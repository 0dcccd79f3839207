"""The loop: start or resume, step, evaluate, stop. What a step is stands in step.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from argusrl.errors import AdapterRefused, CorruptionError, Interrupted, StorageError
from argusrl.journal.commits import Commit
from argusrl.journal.retention import durable_checkpoints
from argusrl.observe.sinks import Sinks, rebuild
from argusrl.recovery.storage_wait import storage_problem
from argusrl.storage.manifest import verify_manifest
from argusrl.storage.visibility import await_published
from argusrl.training.budget import ByteBudget
from argusrl.training.canary import TOLERANCE, Difference
from argusrl.training.collecting import Collector
from argusrl.training.copies import copy_best, copy_last
from argusrl.training.draining import NodeLeaving
from argusrl.training.evaluation import evaluate
from argusrl.training.evaluation_file import BestAdapter, history, read_evaluation, write_evaluation
from argusrl.training.healing import HEALABLE
from argusrl.training.plan_event import say_plan
from argusrl.training.rollout import together
from argusrl.training.run import Run, RunState, Serving
from argusrl.training.step import advantages_of, reference_of, replay_orders, run_step, serve, synchronise
from argusrl.training.watch import Watch
from argusrl.types import TrajectoryRef

_CANARY_TOKENS = 16
_PHASES = ("rollout", "plan", "train", "sync", "commit", "checkpoint")
_INEXACT = (
    "; the replay is not exact, so the committed adapter is used: weights differ by up to {weight_difference:.3g}, "
    "log-probabilities of the canary by up to {logprob_difference:.3g}, {verdict} the tolerance of {tolerance:g}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the loop ended."""

    steps: int
    stopped_early: str = ""  # the rule of the recipe that ended the run before its last step


async def train_under_watch(run: Run, sinks: Sinks) -> Outcome:
    """`train`, with somebody looking at every worker every second."""
    watch = Watch(run.workers, run.config.recovery, run.give_up)
    watch.start()
    run.healing.start()
    sealed = False
    try:
        outcome = await train(run, sinks)
        copy_last(run)
        rebuild(run.folder.metrics, history(run.folder))  # a driver that was fenced may have written to it late
        with suppress(Exception):  # everything is committed
            await close(run)
        return outcome
    except Interrupted:
        sealed = True
        raise
    finally:
        await watch.stop()
        await run.healing.stop(sealed=sealed)


async def train(run: Run, sinks: Sinks) -> Outcome:
    """Run all steps that are not committed yet, and heal what breaks on the way.

    Raises Interrupted on a stop signal, and every fault that the rule (recovery/decide.py) does not heal here.
    """
    fault: BaseException | None = None
    while True:
        try:
            await (bring_to_life(run) if fault is None else recover(run, fault))
            return await _steps(run, sinks)
        except HEALABLE as error:
            if run.stop.is_set():  # no healing any more: what is not sealed is adopted all the same
                raise Interrupted(f"stopped in step {run.state.step + 1}", "run the same command to go on") from error
            first_start = run.state.adapter is None and not isinstance(error, NodeLeaving)
            if first_start or run.fault is not None:
                raise
            fault = error
            if isinstance(error, CorruptionError):  # what is missing with its whole folder is not damaged
                away = storage_problem(run.folder, run.chain.head_sha256)
                if away is None:
                    raise
                fault = StorageError(away)


async def recover(run: Run, fault: BaseException) -> None:
    """Judge a fault, re-make what is broken under a new epoch, and come back to the last commit."""
    await run.healing.prepare(fault)
    run.at("recovering")
    started = time.monotonic()
    run.renew_epoch()
    await bring_to_life(run)
    rebuild(run.folder.metrics, history(run.folder))  # the step's row may be missing
    run.healing.recovered(fault, time.monotonic() - started)


async def _steps(run: Run, sinks: Sinks) -> Outcome:
    best = BestAdapter.of(run.folder, run.state.step)
    copy_best(run, best)
    await _evaluate_if_due(run, best, sinks, metrics=None)
    collector = Collector()
    try:
        return await _steps_until_the_end(run, sinks, best, collector)
    finally:
        run.abandon_ahead()
        await collector.stop()


async def _steps_until_the_end(run: Run, sinks: Sinks, best: BestAdapter, collector: Collector) -> Outcome:
    budget = ByteBudget(run, best, collector)
    ended = time.monotonic()
    while run.state.step < run.config.algorithm.num_steps:
        if reason := best.stop_reason(run.config.evaluate):
            await run.staged()
            await run.workers.ranks.finish_checkpoint()
            return Outcome(steps=run.state.step, stopped_early=reason)
        if run.leaving.is_set():
            await run.leave()
        if run.healing.can_grow():
            run.say("larger", "ranks that stayed behind are back")
            run.renew_epoch()
            await bring_to_life(run)
        await budget.make_room()
        await run.require_space()
        commit = await run_step(run, run.state.step + 1)
        run.advance(commit)
        run.healing.engines.keep_standby()
        metrics: dict[str, Any] = {"step": commit.step, **commit.metrics, "time/commit_seconds": run.commit_seconds}
        phases = sum(float(metrics[f"time/{name}_seconds"]) for name in _PHASES)
        metrics["time/gap_seconds"] = time.monotonic() - ended - phases
        ended = time.monotonic()
        await say_plan(run, metrics)
        await _evaluate_if_due(run, best, sinks, metrics)
        ended += metrics.get("time/evaluate_seconds", 0.0)
        await collector.go_on(run, best)
    await collector.wait()
    await run.keep_state()  # also where writing the last checkpoint failed before a fault was healed
    return Outcome(steps=run.state.step)


async def bring_to_life(run: Run) -> None:
    """All workers are there and in the state of the last commit; or the first one is made.

    The same at the first start, when a new driver takes over living workers, and after a fault: what works stays.
    """
    run.phase("start")
    run.at("started")
    healing, workers = run.healing, run.workers
    head = run.chain.head()
    run.state = RunState() if head is None else RunState.of(head)
    workers.position.step = workers.position.ahead = 0  # workers refuse to go back, and a replay may begin at any step
    if run.colocation.shared and run.workers_share_gpus:
        await run.unless_stopped(_players_up(run))  # engines measure free memory while they start: ranks come later
        await run.colocation.engines_first()
        new = await run.unless_stopped(healing.ranks_up())
    else:
        new, _ = await run.unless_stopped(together([healing.ranks_up(), _players_up(run)]))
    run.at("ranks_connected")
    await run.colocation.reset()
    canary = run.state.canary
    assert canary is not None
    base = await workers.ranks.set_canary(canary)
    await workers.engines.set_canary(canary)
    if head is None:
        run.state = replace(run.state, base_canary=base)
        await _commit_root(run)
    else:
        await _restore(run, head, new)


async def _players_up(run: Run) -> None:
    """Engines and episode workers; the sequence that proves adapters is recorded with them where there is none yet."""
    await run.healing.engines_up()
    await run.healing.episodes_up()
    run.at("attached")
    if run.state.canary is None:
        await run.workers.engines.someone(run.config.cluster.start_timeout_seconds)
        run.state = replace(run.state, canary=await _make_canary(run))
        run.phase("start")  # of the ranks, if they are not there yet


async def _make_canary(run: Run) -> TrajectoryRef:
    """Record the sequence that proves adapters: the base model's greedy reply to the first training prompt."""
    run.phase("canary")
    tokens = min(_CANARY_TOKENS, run.config.rollout.max_response_tokens)
    settings = replace(run.play_settings(), temperature=0.0, max_response_tokens=tokens)
    await run.workers.episodes.begin()
    run.journal_open = True
    return await run.workers.episodes.make_canary(settings)


async def _commit_root(run: Run) -> None:
    """Publish version 0, prove it, and write commit 0: the root of the chain."""
    run.phase("sync")
    sealed = await run.workers.episodes.seal()
    synced = await synchronise(run, version=0)
    commit = run.chain.append(
        Commit(
            step=0,
            epoch=run.epoch.number,
            outcome="initial",
            adapter=synced.adapter,
            state_digest=synced.state_digest,
            config_sha256=run.config_sha256,
            segments=tuple(segment for one in sealed for segment in one.segments),
            algorithm_state=run.state.after(synced.canary),
            conditions=run.conditions,
        )
    )
    run.checkpoint(commit)
    run.advance(commit)


async def _restore(run: Run, head: Commit, new_ranks: bool) -> None:
    """Newest durable checkpoint, then the updates after it again from the journal, then the committed adapter.

    Nothing is generated: every trajectory of a committed step is in the journal. Ranks that hold the committed state
    already keep it.
    """
    run.phase("resume")
    started = time.monotonic()
    at = head.step
    ranks = run.workers.ranks
    digest = None if new_ranks else await ranks.state_digest()
    if digest != head.state_digest:
        at = await _load_newest_checkpoint(run, head.step)
        for step in range(at + 1, head.step + 1):
            run.workers.position.step = step
            await _replay(run, run.chain.read(step))
        run.workers.position.step = head.step
        digest = await ranks.state_digest()
    run.workers.position.step = head.step
    inexact: dict[str, Any] = {}
    canary = await ranks.canary()
    if digest != head.state_digest:
        inexact = await _take_committed(run, head, canary)
        canary = await ranks.canary()
    run.at("replayed")
    await run.colocation.to_sync()
    await _serve_committed(run, *run.served_before(head), Serving(head.adapter, canary))
    run.settled = True
    run.at("restored")
    run.say(
        "replay_inexact" if inexact else "resumed",
        f"state of step {head.step} restored from the checkpoint of step {at}"
        + (f" and {head.step - at} replayed updates" if head.step > at else "")
        + (_INEXACT.format(**inexact) if inexact else ""),
        warning=bool(inexact),
        step=head.step,
        checkpoint=at,
        seconds=round(time.monotonic() - started, 3),
        **inexact,
    )


async def _serve_committed(run: Run, *versions: Serving) -> None:
    """Raises CorruptionError where an adapter is refused because its bytes changed at rest: no engine can help that."""
    try:
        await serve(run, *versions)
    except AdapterRefused:
        for one in versions:
            folder = run.folder.absolute(one.adapter.path)
            await asyncio.to_thread(await_published, folder)
            await asyncio.to_thread(verify_manifest, folder)
        raise


async def _take_committed(run: Run, head: Commit, replayed: Sequence[float]) -> dict[str, Any]:
    """After a replay that was not exact the committed adapter wins; how far they are apart."""
    weights = await run.workers.ranks.load_adapter(str(run.folder.absolute(head.adapter.path)))
    difference = Difference.between(replayed, head.algorithm_state["canary_logprobs"])
    tolerance = TOLERANCE[run.dtype]
    return {
        "weight_difference": weights,
        "logprob_difference": difference.largest,
        "tolerance": tolerance.largest,
        "verdict": "within" if tolerance.times(difference) <= 1 else "beyond",
    }


async def _load_newest_checkpoint(run: Run, head: int) -> int:
    """Load the newest checkpoint that is whole; the step it belongs to. Without one: the state before step 1."""
    for checkpoint in reversed(durable_checkpoints(run.folder, run.chain)):
        assert checkpoint.step <= head
        try:
            await run.workers.ranks.load_checkpoint(str(checkpoint.path))
        except CorruptionError as error:
            run.say("checkpoint_damaged", f"{error.message}: trying the one before", warning=True)
            continue
        return checkpoint.step
    root = run.chain.read(0)
    if await run.workers.ranks.state_digest() != root.state_digest:
        raise CorruptionError(
            "no usable checkpoint, and the fresh state is not the one the run began with",
            "are model and library versions those of the first attempt? `argusrl runs show` lists them",
        )
    return 0


async def _replay(run: Run, commit: Commit) -> None:
    """Do a committed step's updates again."""
    trajectories: Sequence[TrajectoryRef] = [reference_of(commit, n) for n in range(len(commit.trajectories))]
    advantages = advantages_of(trajectories, run.config.algorithm.advantage)
    await run.workers.ranks.update(replay_orders(run, commit, trajectories, advantages))


async def _evaluate_if_due(run: Run, best: BestAdapter, sinks: Sinks, metrics: dict[str, Any] | None) -> None:
    """Evaluate after this step where the recipe says so, and write the step's row, evaluation included."""
    every, step = run.config.evaluate.every_steps, run.state.step
    row: dict[str, Any] = metrics or {"step": step}
    due = run.checked.heldout_prompts and every and (step % every == 0 or step == run.config.algorithm.num_steps)
    done = read_evaluation(run.folder, step)
    fresh = bool(due) and done is None
    if fresh:
        done = await _evaluate(run, step)
        best.see(step, done)
        if best.step == step:
            copy_best(run, best)
        run.display.evaluation(step, done["metrics"])
    if done is not None:
        row |= done["metrics"]
    if metrics is not None:
        sinks.write(row)
        run.display.step(row)
    elif fresh and step == 0:
        sinks.write(row)
    elif fresh:  # an interrupted attempt had committed the step, whose row is written already
        rebuild(run.folder.metrics, history(run.folder))


async def _evaluate(run: Run, step: int) -> dict[str, Any]:
    run.phase("evaluate")
    run.at("evaluating")
    started = time.monotonic()
    prompts = min(run.checked.heldout_prompts, run.config.evaluate.prompts or run.checked.heldout_prompts)
    work = evaluate(
        run.workers.episodes,
        run.play_settings(),
        run.config,
        prompts=prompts,
        engines=len(run.workers.engines.members),
    )
    result = await run.unless_stopped(work)
    assert run.state.adapter is not None
    record = {
        "step": step,
        "adapter_version": run.state.adapter.version,
        "adapter_sha256": run.state.adapter.sha256,
        "metrics": {**result.metrics(), "time/evaluate_seconds": time.monotonic() - started},
        **result.report(),
    }
    write_evaluation(run.folder, step, record)
    return record


async def close(run: Run) -> None:
    """End episode workers' processes; actors are killed with the placement."""
    await asyncio.wait_for(run.workers.episodes.close(), timeout=10)
