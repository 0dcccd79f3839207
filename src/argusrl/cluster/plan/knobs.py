"""Which change of a recipe makes a failing limit hold: candidates, tried one after the other on the plan itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from argusrl.cluster.instances import INSTANCES, Instance
from argusrl.cluster.manifests.sizes import memory_quantity, quantity_bytes
from argusrl.cluster.plan.limits import Limit
from argusrl.config.cluster_sections import WorkersSection
from argusrl.config.sections import Config

_GIB = 2**30
_SHARES = (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
_SMALLEST_PIXELS = 65_536
_TIERS = (125, 250, 500, 1000)  # MB/s for each TiB, PERSISTENT_2
_METADATA_IOPS = (1500, 3000, 6000, 12_000, 24_000, 48_000, 96_000, 192_000)
_VOLUME_STEP_BYTES = 2400 * _GIB
_MEMORY_MARGIN = 1.2
_WORKERS = "cluster.kubernetes.workers"
INSTANCE = "--instance"  # in place of a key: another kind of node

Changes = tuple[str, ...]
"""key=value, several at once where one alone does nothing; the first may be --instance NAME."""


def changes_for(limit: Limit, config: Config, bundles: int) -> Iterator[Changes]:
    """Changes that may help a run in so many bundles, the mildest first."""
    yield from _BY_KIND[limit.kind](_Candidates(limit, config, bundles))


@dataclass(frozen=True, slots=True)
class _Candidates:
    """For one limit of one recipe."""

    limit: Limit
    config: Config
    bundles: int

    def engine_gpus(self) -> Iterator[Changes]:
        yield ("engine.tensor_parallel=1",)

    def slots(self) -> Iterator[Changes]:
        yield (f"cluster.slots={int(self.limit.available)}",)

    def larger_share(self) -> Iterator[Changes]:
        for share in _SHARES:
            if share > self.config.engine.gpu_memory_share:
                yield (f"engine.gpu_memory_share={share}",)
        if (
            self.config.adapter.kind == "lora"
            and self.config.adapter.serving != "merged"
            and not self.config.rollout.staleness
        ):
            yield ("adapter.serving=merged",)
        yield from self.separate_fleets()
        yield from self.fewer_pixels()
        yield from self.larger_gpu()

    def cache(self) -> Iterator[Changes]:
        if self.config.engine.cache_bytes is not None:
            more = self.limit.needed / max(1.0, self.limit.available)
            size = -(-int(self.config.engine.cache_bytes * more) // 2**20) * 2**20
            yield (f"engine.cache_bytes={size}",)
            yield ("engine.cache_bytes=null",)
        yield from self.larger_share()

    def rollout(self) -> Iterator[Changes]:
        for share in reversed(_SHARES):
            if share < self.config.engine.gpu_memory_share:
                yield (f"engine.gpu_memory_share={share}",)
        if not self.config.engine.eager:
            yield ("engine.eager=true",)
        yield from self.separate_fleets()
        yield from self.larger_gpu()

    def training(self) -> Iterator[Changes]:
        if self.config.training.gradient_checkpointing is False:
            yield ("training.gradient_checkpointing=true",)
        budget = self.config.training.micro_batch_tokens
        while budget > self.config.rollout.max_response_tokens:
            budget //= 2
            yield (f"training.micro_batch_tokens={budget}",)
        yield from self.fewer_pixels()
        if self.config.cluster.slots is not None:
            for times in (2, 4, 8):
                yield (f"cluster.slots={times * self.config.cluster.slots}",)
        yield from self.larger_gpu()

    def worker(self) -> Iterator[Changes]:
        yield from self.more_memory(self.limit.needed)
        if self.config.cluster.device != "cuda" and self.config.engine.cache_bytes is None:
            for size in (2**29, 2**28, 2**26):
                yield (f"engine.cache_bytes={size}",)
        if self.config.recovery.standby_engines:
            yield ("recovery.standby_engines=0",)
        workers = self.config.cluster.episode_workers
        while workers > 1:
            workers //= 2
            yield (f"cluster.episode_workers={workers}",)
        prompts = self.config.algorithm.prompts_per_step
        while prompts > 2 * self.config.algorithm.updates_per_step:
            prompts //= 2
            yield (f"algorithm.prompts_per_step={prompts}",)
        budget = self.config.training.micro_batch_tokens
        while budget > 1024:
            budget //= 2
            yield (f"training.micro_batch_tokens={budget}",)
        if self.config.cluster.device != "cuda":
            yield ("training.gradient_checkpointing=true",)
        slots = self.config.cluster.slots or 1
        while slots > 1:
            slots //= 2
            yield (f"cluster.slots={slots}",)
        yield from self.larger_gpu()

    def more_memory(self, needed: float) -> Iterator[Changes]:
        """Bytes of a worker's pod, up to what its node has: only where the recipe holds it below that."""
        workers = self.workers
        if workers is None or workers.memory is None:
            return
        kind = self.known
        size = _whole_gib(needed * _MEMORY_MARGIN)
        if kind is None or size <= kind.allocatable_bytes:
            yield (f"{_WORKERS}.memory={memory_quantity(size)}",)
        if kind is not None:
            yield (f"{_WORKERS}.memory=null",)

    def shared_memory(self) -> Iterator[Changes]:
        yield from self.more_memory(2 * self.limit.needed)  # at most half of a pod's memory
        for rank in (256, 128, 64, 32, 16, 8):
            if self.config.adapter.kind == "lora" and rank < self.config.adapter.rank:
                yield (f"adapter.rank={rank}",)
        yield from self.larger_gpu()

    def head(self) -> Iterator[Changes]:
        size = _whole_gib(self.limit.needed * _MEMORY_MARGIN)
        if self.config.cluster.kubernetes is not None:
            yield (f"cluster.kubernetes.head.memory={memory_quantity(size)}",)
            for kind in sorted(INSTANCES.values(), key=lambda one: one.memory_bytes):
                if not kind.gpus and kind.allocatable_bytes >= size:
                    head = "cluster.kubernetes.head"
                    yield f"{head}.instance={kind.hyperpod_name}", f"{head}.memory={memory_quantity(size)}"

    def capacity(self) -> Iterator[Changes]:
        if self.config.cluster.kubernetes is not None:
            size = quantity_bytes(self.config.cluster.kubernetes.volume.capacity)
            while size < 64 * _VOLUME_STEP_BYTES:
                size = -(-(size + 1) // _VOLUME_STEP_BYTES) * _VOLUME_STEP_BYTES  # what FSx sells
                yield (f"cluster.kubernetes.volume.capacity={memory_quantity(size)}",)
        if self.config.checkpoint.keep_trajectories:
            yield ("checkpoint.keep_trajectories=false",)
        for kept in (20, 10, 5, 2):
            if kept < self.config.checkpoint.keep_adapters:
                yield (f"checkpoint.keep_adapters={kept}", "checkpoint.keep_trajectories=false")

    def checkpoint(self) -> Iterator[Changes]:
        for every in (2, 5, 10, 20, 50):
            if every > self.config.checkpoint.every_steps:
                yield (f"checkpoint.every_steps={every}",)
        if self.config.cluster.kubernetes is not None:
            for tier in _TIERS:
                if tier > self.config.cluster.kubernetes.volume.throughput_mb_per_tib:
                    yield (f"cluster.kubernetes.volume.throughput_mb_per_tib={tier}",)

    def metadata(self) -> Iterator[Changes]:
        for rate in _METADATA_IOPS:
            if rate >= self.limit.needed:
                yield (f"cluster.kubernetes.volume.metadata_iops={rate}",)

    def separate_fleets(self) -> Iterator[Changes]:
        """Half of the GPUs for engines alone: slower, and one process on a GPU instead of two."""
        cluster, engine = self.config.cluster, self.config.engine
        if not cluster.colocate or self.bundles < 2:
            return
        layout = ["cluster.colocate=false", f"cluster.engines={self.bundles // 2}"]
        if cluster.slots is None:
            layout.append(f"cluster.slots={self.bundles}")
        for share in sorted({engine.gpu_memory_share, *_SHARES}, key=lambda one: abs(one - engine.gpu_memory_share)):
            changes = layout if share == engine.gpu_memory_share else [*layout, f"engine.gpu_memory_share={share}"]
            yield tuple(changes)
            if not engine.eager:
                yield *changes, "engine.eager=true"

    def fewer_pixels(self) -> Iterator[Changes]:
        pixels = self.config.model.max_pixels or 2**22
        while pixels > _SMALLEST_PIXELS:
            pixels //= 2
            yield (f"model.max_pixels={pixels}",)

    def larger_gpu(self) -> Iterator[Changes]:
        """Another kind of node, when no key helps; sizes of pods that were chosen for the old kind go."""
        least = self.known.gpu_bytes if self.known is not None else 0
        chosen = [key for key in ("cpus", "memory", "gpus") if getattr(self.workers, key, None) is not None]
        for kind in sorted(INSTANCES.values(), key=lambda one: (one.gpu_bytes, one.gpus)):
            if kind.gpu_bytes > least:
                yield f"{INSTANCE} {kind.hyperpod_name}", *(f"{_WORKERS}.{key}=null" for key in chosen)

    @property
    def workers(self) -> WorkersSection | None:
        kubernetes = self.config.cluster.kubernetes
        return None if kubernetes is None else kubernetes.workers

    @property
    def known(self) -> Instance | None:
        """The recipe's kind of node, if it is in the table."""
        name = self.workers.instance if self.workers is not None else None
        return INSTANCES.get(name.removeprefix("ml.")) if name else None


def _whole_gib(size: float) -> int:
    return -(-int(size) // _GIB) * _GIB


_BY_KIND: dict[str, Callable[[_Candidates], Iterator[Changes]]] = {
    "engine GPUs": _Candidates.engine_gpus,
    "slots": _Candidates.slots,
    "engine share": _Candidates.larger_share,
    "cache": _Candidates.cache,
    "rollout": _Candidates.rollout,
    "training": _Candidates.training,
    "worker": _Candidates.worker,
    "shared memory": _Candidates.shared_memory,
    "head": _Candidates.head,
    "capacity": _Candidates.capacity,
    "checkpoint": _Candidates.checkpoint,
    "metadata": _Candidates.metadata,
}
