"""Sampling noise keyed by (seed, position), and tokens that are never sampled.

vLLM loads both classes by name into its worker. Its own per-request generators advance with every draw, so a
reply that is continued elsewhere would see other noise. Here the generator is seeded anew before each draw from
the request's seed and the number of tokens before the draw, so a continuation needs no state at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

_MASK = (1 << 64) - 1


def noise_key(seed: int, position: int) -> int:
    """63-bit seed of the draw at `position` (tokens before it, images expanded). Two rounds of SplitMix64."""
    value = seed & _MASK
    for step in (position + 1, 1):
        value = (value + step * 0x9E3779B97F4A7C15) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value >> 1


def noise_keys(seeds: np.ndarray, positions: np.ndarray) -> list[int]:
    """noise_key of many draws at once; both arrays are uint64 [n]."""
    values = seeds.copy()
    for steps in (positions + np.uint64(1), np.uint64(1)):
        values += steps * np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        values ^= values >> np.uint64(31)
    return (values >> np.uint64(1)).tolist()


class _Draws(NamedTuple):
    """What names the draws of one request: its seed and how many tokens precede the next one."""

    seed: int
    prompt_tokens: int
    output_ids: list[int]  # vLLM's own list, growing


class PositionKeyedNoise(LogitsProcessor):
    """Seeds the generator of every sampled row by (seed, position) just before the draw."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._draws: dict[int, _Draws] = {}  # by row of the batch
        self._seeds = np.empty(0, dtype=np.uint64)  # in the order of the draws
        self._generators: dict[int, torch.Generator] | None = None

    def attach(self, generators: dict[int, torch.Generator]) -> None:
        """Give the batch's generators, by row. Without them a draw raises."""
        self._generators = generators

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if process_dict_updates(self._draws, batch_update, _draws_of):
            seeds = [draws.seed & _MASK for draws in self._draws.values()]
            self._seeds = np.array(seeds, dtype=np.uint64)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._draws and self._generators is None:
            raise RuntimeError("the batch's generators were never attached: noise would not be keyed by position")
        positions = [draws.prompt_tokens + len(draws.output_ids) for draws in self._draws.values()]
        keys = noise_keys(self._seeds, np.array(positions, dtype=np.uint64))
        for row, key in zip(self._draws, keys, strict=True):
            generator = (self._generators or {}).get(row)
            if generator is None:
                raise RuntimeError(f"row {row} of the batch is sampled with a seed but has no generator of its own")
            generator.manual_seed(key)
        return logits


def _draws_of(params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _Draws | None:
    if params.seed is None or params.temperature == 0:
        return None
    return _Draws(params.seed, len(prompt_ids or ()), output_ids)


class BannedTokens(LogitsProcessor):
    """Gives the ids of `additional_config["banned_ids"]` probability zero in every request, greedy ones included.

    The trainer masks the same ids with the same -inf, so both normalise over the same vocabulary.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        import torch

        config: Any = vllm_config.additional_config
        self._ids = torch.tensor(sorted(config["banned_ids"]), dtype=torch.long, device=device)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        return None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill_(-1, self._ids, float("-inf"))
