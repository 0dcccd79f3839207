"""Starts all workers of a run, or takes over those that a driver before this one left alive."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from argusrl.config.bundles import cache_bytes_on
from argusrl.config.sections import Config
from argusrl.policy.settings import PolicySettings
from argusrl.rollout.engine import EngineSettings
from argusrl.rollout.vllm_engine import engine_environment
from argusrl.storage.digests import sha256_bytes
from argusrl.storage.layout import RunFolder
from argusrl.training.checks import CheckedInput
from argusrl.training.engine_worker import EngineWorker
from argusrl.training.episode_worker import EpisodeWorker
from argusrl.training.fleet import EngineFleet, EpisodeFleet, Member, Position, RankFleet, Workers, kill
from argusrl.training.placement import Placement
from argusrl.training.rank_worker import RankWorker

_ASYNC_CALLS = 10_000  # concurrent calls of an asynchronous actor; its own limits decide
_ANSWER_SECONDS = 1.0  # one that still imports does not answer, and need not


@dataclass(slots=True)
class Hiring:
    """How each worker of a run is started."""

    config: Config
    folder: RunFolder
    placement: Placement
    logs: Path
    position: Position
    checked: CheckedInput = None  # type: ignore[assignment]  # known when workers are told what they are
    begun: dict[int, Any] = field(default_factory=dict)  # processes of engines, by number, before anybody is hired
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # of standbys
    standbys: list[Any] = field(default_factory=list)  # engine workers with everything imported, not started

    @property
    def identity(self) -> str:
        """Of everything a worker is made from; one that was made from other things cannot be taken over."""
        layout = msgspec.to_builtins(self.placement.layout)
        made_from = [self.config.model_dump(mode="json"), layout, version("argusrl")]
        return sha256_bytes(json.dumps(made_from, sort_keys=True).encode())

    def engines(self, found: dict[tuple[str, int], Any]) -> EngineFleet:
        """One engine per bundle that holds one."""
        return EngineFleet(**self._fleet("engine", self.placement.layout.engines, self.engine, found))

    def ranks(self, found: dict[tuple[str, int], Any]) -> RankFleet:
        return RankFleet(**self._fleet("rank", self.placement.layout.ranks, self.rank, found))

    def episodes(self, found: dict[tuple[str, int], Any]) -> EpisodeFleet:
        return EpisodeFleet(**self._fleet("w", self.placement.layout.episode_workers, self.episode_worker, found))

    def _fleet(
        self, kind: str, count: int, make: Callable[[int], Member], found: dict[tuple[str, int], Any]
    ) -> dict[str, Any]:
        members = [Member(n, found[kind, n], fresh=False) if (kind, n) in found else make(n) for n in range(count)]
        return {
            "members": members,
            "make": make,
            "identity": self.identity,
            "position": self.position,
            "deadline_seconds": self.config.cluster.call_timeout_seconds,
        }

    def begin_engines(self) -> None:
        """Begin to start the processes of all engines: what they import takes longest of all that a start waits for."""
        found = self.placement.find()
        for number in range(self.placement.layout.engines):
            if ("engine", number) not in found:
                self.begun[number] = self._engine_process("engine", number, number, idle=False)

    def engine(self, number: int) -> Member:
        """A new engine in its bundle; one that was begun, or a standby, becomes it where there is one."""
        settings = engine_settings(self.config, self.placement.layout.device, self.checked)
        actor = self.begun.pop(number, None)
        if actor is None and self.standbys and self._near_standby(number):
            actor = self.standbys.pop()
        if actor is None:
            actor = self._engine_process("engine", number, number, idle=False)
        return Member(number, actor, actor.start.remote(settings, self.identity, number))

    def _near_standby(self, number: int) -> bool:
        """Whether standbys, which are made in bundle 0, are on the node of this engine."""
        homes = self.placement.homes()
        return 0 in homes and homes[0] == homes.get(number)

    def standby(self) -> None:
        """Begin to start a process that can become an engine in seconds. It lives beside the first engine."""
        # A number of its own among those of all drivers: one that became an engine keeps its name.
        number = self.placement.epoch * 1000 + next(self.numbers)
        actor = self._engine_process("standby", number, 0, idle=True)
        actor.prepare.remote(engine_settings(self.config, self.placement.layout.device, self.checked))
        self.standbys.append(actor)

    def _engine_process(self, kind: str, number: int, bundle: int, *, idle: bool) -> Any:
        threads = {"OMP_NUM_THREADS": str(max(1, int(self.config.cluster.cpus_per_slot)))}
        return self.placement.start(
            kind,
            number,
            EngineWorker,
            self.folder,
            self.logs,
            self.config.recovery.orphan_seconds,
            bundle=bundle,
            idle=idle,
            environment={**threads, **engine_environment(self.placement.layout.device)},
            max_concurrency=_ASYNC_CALLS,
        )

    def rank(self, number: int) -> Member:
        """A new rank in its bundle."""
        layout, config = self.placement.layout, self.config
        settings = PolicySettings.from_config(config, device=layout.device, banned_ids=self.checked.banned_ids)
        return Member(
            number,
            self.placement.start(
                "rank",
                number,
                RankWorker,
                settings,
                config,
                self.folder,
                self.identity,
                self.logs,
                bundle=layout.bundle("rank", number),
                groups={"beat": 1},
                environment={"OMP_NUM_THREADS": str(config.training.threads)},
            ),
        )

    def episode_worker(self, number: int) -> Member:
        """A new episode worker, outside the bundles."""
        return Member(
            number,
            self.placement.start(
                "w",
                number,
                EpisodeWorker,
                self.config,
                self.folder,
                self.checked.bad_rows,
                self.placement.layout.engines,
                self.identity,
                self.logs,
                bundle=None,
                environment={"OMP_NUM_THREADS": "1"},
                max_concurrency=_ASYNC_CALLS,
            ),
        )


def hire(hiring: Hiring) -> Workers:
    """All workers of a run: those that live, and new ones for the rest. Nobody is waited for."""
    found = hiring.placement.find()
    for number in hiring.begun:
        found.pop(("engine", number), None)
    for place, actor in [item for item in found.items() if item[0][0] == "standby"]:
        serves = _serves(actor)
        if serves is None:
            hiring.standbys.append(actor)
        else:
            found["engine", serves] = actor
        del found[place]
    engines = hiring.engines(found)
    while hiring.begun:  # a standby of before has the place
        kill(hiring.begun.popitem()[1])
    return Workers(
        engines=engines,
        ranks=hiring.ranks(found),
        episodes=hiring.episodes(found),
        position=hiring.position,
        logs=hiring.logs,
        standbys=hiring.standbys,
    )


def _serves(standby: Any) -> int | None:
    """The place of the engine that a standby has become."""
    try:
        place: int | None = ray.get(standby.serves.remote(), timeout=_ANSWER_SECONDS)
    except RayError:  # it still imports: it is a standby
        return None
    return place


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
        live_versions=1 + config.rollout.staleness,
        merged=config.serves_merged(config.model.dtype_on(device)),
        lora_targets=checked.adapted_layers,
        banned_ids=checked.banned_ids,
        end_ids=checked.end_ids,
        cache_bytes=cache_bytes_on(engine, device),
        gpu_memory_share=engine.gpu_memory_share,
        max_sequences=engine.max_sequences,
        eager=not gpu if engine.eager is None else engine.eager,
        tensor_parallel=engine.tensor_parallel,
        min_pixels=config.model.min_pixels,
        max_pixels=config.model.max_pixels,
        options=dict(engine.options),
    )
