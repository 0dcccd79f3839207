"""Starts all workers of a run in the order that colocation allows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from argusrl.config.sections import Config
from argusrl.policy.settings import PolicySettings
from argusrl.rollout.engine import EngineSettings
from argusrl.rollout.vllm_engine import engine_environment
from argusrl.storage.layout import RunFolder
from argusrl.training.checks import CheckedInput
from argusrl.training.engine_worker import EngineWorker
from argusrl.training.episode_worker import EpisodeWorker
from argusrl.training.fleet import EngineFleet, EpisodeFleet, Position, RankFleet, Workers
from argusrl.training.placement import Placement
from argusrl.training.rank_worker import RankWorker

_ASYNC_CALLS = 10_000  # concurrent calls of an asynchronous actor; its own limits decide


def start_workers(
    config: Config, folder: RunFolder, placement: Placement, checked: CheckedInput, epoch: int, logs: Path
) -> Workers:
    """Create all actors; nobody is waited for."""
    layout = placement.layout
    position = Position(epoch)
    deadline = config.cluster.call_timeout_seconds
    engines = start_engines(config, folder, placement, checked, logs)
    settings = PolicySettings.from_config(config, device=layout.device, banned_ids=checked.banned_ids)
    first = 0 if layout.colocate else layout.engines
    threads = {"OMP_NUM_THREADS": str(config.training.threads)}
    ranks = [
        placement.start(
            RankWorker, first + rank, settings, config, folder, rank, layout.ranks, logs, environment=threads
        )
        for rank in range(layout.ranks)
    ]
    return Workers(
        engines=EngineFleet(engines, position, deadline),
        ranks=RankFleet(ranks, position, deadline),
        episodes=EpisodeFleet(
            start_episode_workers(config, folder, placement, checked, engines, logs), position, deadline
        ),
        position=position,
        logs=logs,
    )


def start_engines(
    config: Config, folder: RunFolder, placement: Placement, checked: CheckedInput, logs: Path
) -> list[Any]:
    """One engine actor per bundle that holds one."""
    settings = engine_settings(config, placement.layout.device, checked)
    environment = {"OMP_NUM_THREADS": str(max(1, int(config.cluster.cpus_per_slot))), **engine_environment(settings)}
    return [
        placement.start(
            EngineWorker, index, settings, folder, index, logs, environment=environment, max_concurrency=_ASYNC_CALLS
        )
        for index in range(placement.layout.engines)
    ]


def start_episode_workers(
    config: Config, folder: RunFolder, placement: Placement, checked: CheckedInput, engines: list[Any], logs: Path
) -> list[Any]:
    """Actors outside the bundles."""
    return [
        placement.start_outside(
            EpisodeWorker,
            f"w{index}",
            config,
            folder,
            checked.bad_rows,
            engines,
            logs,
            environment={"OMP_NUM_THREADS": "1"},
            max_concurrency=_ASYNC_CALLS,
        )
        for index in range(placement.layout.episode_workers)
    ]


def engine_settings(config: Config, device: str, checked: CheckedInput) -> EngineSettings:
    """What an engine needs to start."""
    gpu = device == "cuda"
    lora = config.adapter.kind == "lora"
    engine = config.engine
    return EngineSettings(
        model=config.model.path,
        revision=config.model.revision,
        dtype=config.model.dtype_on(device),
        device=device,
        max_tokens=config.model.max_tokens,
        max_images=checked.max_images,
        lora_rank=config.adapter.rank if lora else None,
        lora_alpha=config.adapter.scale_alpha,
        lora_targets=checked.adapted_layers,
        banned_ids=checked.banned_ids,
        end_ids=checked.end_ids,
        cache_bytes=engine.cache_bytes or (None if gpu else 1 << 30),
        gpu_memory_share=engine.gpu_memory_share,
        max_sequences=engine.max_sequences,
        eager=not gpu if engine.eager is None else engine.eager,
        tensor_parallel=engine.tensor_parallel,
        min_pixels=config.model.min_pixels,
        max_pixels=config.model.max_pixels,
        options=dict(engine.options),
    )


async def wait_ready(config: Config, workers: Workers, *, one_after_other: bool) -> None:
    """Returns when engines, ranks and episode workers are up. Raises what a start raised.

    `one_after_other` (ranks and engines share GPUs): engines measure free memory while they start, so ranks come
    into it later, when the engines sleep.
    """
    deadline = config.cluster.start_timeout_seconds
    both = asyncio.gather(workers.engines.ready(deadline), workers.episodes.ready(deadline))
    if one_after_other:
        await both
    else:
        await asyncio.gather(both, workers.ranks.connect(deadline))
