"""Sampling noise keyed by (seed, position), and tokens that are never sampled.

vLLM loads both classes by name into its worker. Its own per-request generators advance with every draw, so a
reply that is continued elsewhere would see other noise. Here the generator is seeded anew before each draw from
the request's seed and the number of tokens before the draw, so a continuation needs no state at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

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


class _Draws(NamedTuple):
    """What names the draws of one request: its seed and how many tokens precede the next one."""

    seed: int
    prompt_tokens: int
    output_ids: list[int]  # vLLM's own list, growing


class PositionKeyedNoise(LogitsProcessor):
    """Seeds the generator of every sampled row by (seed, position) just before the draw."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._draws: dict[int, _Draws] = {}  # by row of the batch
        self._generators: dict[int, torch.Generator] | None = None

    def attach(self, generators: dict[int, torch.Generator]) -> None:
        """Give the batch's generators, by row. Without them a draw raises."""
        self._generators = generators

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._draws, batch_update, _draws_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if self._draws and self._generators is None:
            raise RuntimeError("the batch's generators were never attached: noise would not be keyed by position")
        for row, draws in self._draws.items():
            generator = (self._generators or {}).get(row)
            if generator is None:
                raise RuntimeError(f"row {row} of the batch is sampled with a seed but has no generator of its own")
            generator.manual_seed(noise_key(draws.seed, draws.prompt_tokens + len(draws.output_ids)))
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
