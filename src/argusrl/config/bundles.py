"""What a recipe makes of the machine it gets, where it leaves that open."""

from __future__ import annotations

from argusrl.config.sections import ClusterSection, EngineSection

_CPU_CACHE_BYTES = 1 << 30


def split(cluster: ClusterSection, slots: int) -> tuple[int, int]:
    """(ranks, engines) in so many bundles; one of them may be 0 where there are too few."""
    if cluster.colocate:
        return slots, slots
    engines = cluster.engines or slots // 2
    return slots - engines, engines


def cache_bytes_on(engine: EngineSection, device: str) -> int | None:
    """Of an engine's KV cache on "cuda" or "cpu"; None: what engine.gpu_memory_share leaves."""
    return engine.cache_bytes or (_CPU_CACHE_BYTES if device == "cpu" else None)
