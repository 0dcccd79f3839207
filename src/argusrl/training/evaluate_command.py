"""Evaluation outside a run: base model against adapter, with engines and episode workers only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argusrl.config.secrets import resolve_environment
from argusrl.config.sections import Config
from argusrl.errors import ConfigError
from argusrl.storage.layout import RunFolder
from argusrl.training.bring_up import Hiring
from argusrl.training.checks import CheckedInput, check_in_child, settings_for
from argusrl.training.evaluation import evaluate
from argusrl.training.fleet import Fleet, Position
from argusrl.training.placement import Placement, place
from argusrl.training.watch import keep_alive
from argusrl.types import AdapterRef

_EPOCH = 1  # nobody else calls these workers


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationJob:
    """What to evaluate. `adapter` lies in `folder`; None evaluates the base model alone."""

    config: Config
    folder: RunFolder
    adapter: AdapterRef | None
    logs: Path


def run_evaluation(job: EvaluationJob, say: Callable[[str], None]) -> dict[str, Any]:
    """{"base": …, "adapter": …} with greedy and sampled accuracy, counts and intervals. Raises every typed error."""
    checked = check_in_child(job.config)
    for warning in checked.warnings:
        say(warning)
    if not checked.heldout_prompts:
        raise ConfigError("there is nothing to evaluate on", "set data.heldout (files) or data.heldout_size")
    placement = place(job.config.cluster, resolve_environment(job.config.cluster.environment))
    try:
        return asyncio.run(_evaluate(job, checked, placement, say))
    finally:
        placement.close()


async def _evaluate(
    job: EvaluationJob, checked: CheckedInput, placement: Placement, say: Callable[[str], None]
) -> dict[str, Any]:
    config = job.config.model_copy(update={"adapter": job.config.adapter.side_by_side()})
    hiring = Hiring(config, job.folder, placement, job.logs, Position(_EPOCH), checked)
    engines, episodes = hiring.engines({}), hiring.episodes({})
    start = config.cluster.start_timeout_seconds
    say("starting engines")
    fleets: list[Fleet] = [engines, episodes]
    await asyncio.gather(*(fleet.attach(n, start) for fleet in fleets for n in range(len(fleet.members))))
    lease = config.recovery.orphan_seconds
    alive = asyncio.create_task(keep_alive(lambda: [*engines.actors, *episodes.actors], hiring.position, lease))
    engines.serving = set(range(len(engines.members)))
    await episodes.set_engines(engines.handles())
    prompts = min(checked.heldout_prompts, config.evaluate.prompts or checked.heldout_prompts)
    report: dict[str, Any] = {"prompts": prompts, "samples": config.evaluate.samples}
    for name, adapter in (("base", None), ("adapter", job.adapter)):
        if name == "adapter" and adapter is None:
            continue
        if adapter is not None:
            await engines.load_adapter(adapter)
        say(f"evaluating {name}")
        result = await evaluate(
            episodes, settings_for(config, adapter), config, prompts=prompts, engines=len(engines.members)
        )
        report[name] = result.report()
    if job.adapter is not None:
        report["adapter"] |= {"version": job.adapter.version, "sha256": job.adapter.sha256}
    alive.cancel()
    await episodes.close()
    return report
