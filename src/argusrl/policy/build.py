"""From settings to a sharded model that all ranks share."""

from __future__ import annotations

from collections.abc import Callable

from argusrl.policy import sharding
from argusrl.policy.lora import add_lora, load_initial
from argusrl.policy.model import decoder_of, head_of, load_model, torch_dtype
from argusrl.policy.scorer import Scorer
from argusrl.policy.settings import PolicySettings

BuildScorer = Callable[[PolicySettings, int, int], tuple[Scorer, sharding.GradientWatch]]


def build_scorer(settings: PolicySettings, rank: int, world: int) -> tuple[Scorer, sharding.GradientWatch]:
    """Load, adapt, shard, share; a collective of all ranks, of which the first reads the model. Raises ModelError."""
    reader = rank == 0
    base = load_model(settings, reader=reader)
    model = base
    if settings.kind == "lora":
        model = add_lora(base, settings)
        if settings.initial is not None:
            load_initial(model, settings.initial, settings)
    else:
        for part in (decoder_of(base), head_of(base)):
            part.float().requires_grad_(True)  # float32 master weights
    scorer = Scorer(model, base).train(settings.gradient_checkpointing)
    full = scorer.state_dict() if reader and world > 1 else {}
    buffers = dict(scorer.named_buffers()) if reader else {}
    watch = sharding.shard(scorer, base, sharding.make_mesh(settings.device), torch_dtype(settings.dtype))
    sharding.share_weights(scorer, full, buffers, settings.device)
    return scorer, watch
