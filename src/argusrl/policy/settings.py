"""Everything a rank needs to build its Policy, resolved from the recipe on the driver. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # a rank has its settings from the driver and needs nothing that reads recipes
    from argusrl.config.sections import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """See the recipe's sections of the same names for what the fields mean."""

    model: str
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]  # of the computation and of published tensors
    banned_ids: tuple[int, ...] = ()  # never sampled by the engine, so without probability here, too
    revision: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    kind: Literal["lora", "full"] = "lora"
    rank: int = 32
    alpha: float = 64.0
    target: Literal["language"] | tuple[str, ...] = "language"
    initial: Path | None = None
    seed: int = 0
    deterministic: bool = False
    threads: int = 1
    gradient_checkpointing: bool = False
    temperature: float = 1.0
    updates_per_step: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.2
    importance_cap: float | None = 2.0
    kl_weight: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    @classmethod
    def from_config(
        cls, config: Config, *, device: Literal["cpu", "cuda"], banned_ids: tuple[int, ...] = ()
    ) -> PolicySettings:
        """Resolve every `auto` of the recipe for `device`."""
        adapter, model, training = config.adapter, config.model, config.training
        gpu = device == "cuda"
        return cls(
            model=model.path,
            revision=model.revision,
            device=device,
            dtype=model.dtype_on(device),
            banned_ids=banned_ids,
            min_pixels=model.min_pixels,
            max_pixels=model.max_pixels,
            kind=adapter.kind,
            rank=adapter.rank,
            alpha=adapter.scale_alpha,
            target="language" if adapter.target == "language" else tuple(adapter.target),
            initial=adapter.initial,
            seed=config.run.seed,
            deterministic=config.run.deterministic,
            threads=training.threads,
            gradient_checkpointing=gpu if training.gradient_checkpointing is None else training.gradient_checkpointing,
            temperature=config.rollout.temperature,
            updates_per_step=config.algorithm.updates_per_step,
            clip_low=config.algorithm.clip_low,
            clip_high=config.algorithm.clip_high,
            importance_cap=config.algorithm.importance_cap,
            kl_weight=config.algorithm.kl_weight,
            betas=config.optimizer.betas,
            epsilon=config.optimizer.epsilon,
            weight_decay=config.optimizer.weight_decay,
            max_grad_norm=config.optimizer.max_grad_norm,
        )
