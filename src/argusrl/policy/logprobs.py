"""Log-probabilities of chosen tokens from hidden states, in chunks: never the logits of a whole row at once.

The distribution is the one the engine samples from: logits / temperature, banned ids without probability.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 512


def token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, temperature: float, banned: Tensor
) -> tuple[Tensor, Tensor]:
    """[N, H] hidden states and a [V, H] head -> ([N] log-probabilities with gradient, [N] entropies without), float32.

    `banned` holds ids without probability. Where the head is frozen, the forward keeps d(log-probability)/d(hidden)
    instead of probabilities, so that the backward is one product; otherwise it computes chunks again.
    """
    if weight.requires_grad:
        pieces = [
            checkpoint(_chunk, rows, weight, bias, ids, temperature, banned, use_reentrant=False)
            for rows, ids in zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True)
        ]
        logprobs = torch.cat([piece[0] for piece in pieces])
        return logprobs, torch.cat([piece[1] for piece in pieces]).detach()
    return _FrozenHead.apply(hidden, weight, bias, targets, temperature, banned)


def _distribution(rows: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, banned: Tensor) -> Tensor:
    """[n, V] float32 log-probabilities of all tokens."""
    logits = torch.nn.functional.linear(rows, weight, bias).float() / temperature
    if banned.numel():
        logits = logits.index_fill(1, banned, float("-inf"))
    return torch.log_softmax(logits, dim=-1)


def _entropy(logs: Tensor, probabilities: Tensor) -> Tensor:
    return -(probabilities * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1)  # 0 · -inf is NaN


def _chunk(
    rows: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, temperature: float, banned: Tensor
) -> tuple[Tensor, Tensor]:
    logs = _distribution(rows, weight, bias, temperature, banned)
    fixed = logs.detach()
    return logs.gather(1, ids[:, None])[:, 0], _entropy(fixed, fixed.exp())


class _FrozenHead(torch.autograd.Function):
    """d log p(y) / d hidden = (W[y] - Σ p(v) W[v]) / temperature, kept as an [N, H] matrix."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        banned: Tensor,
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropies = torch.empty_like(logprobs)
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            logs = _distribution(hidden[part], weight, bias, temperature, banned)
            logprobs[part] = logs.gather(1, targets[part, None])[:, 0]
            probabilities = logs.exp()
            entropies[part] = _entropy(logs, probabilities)
            if slopes is not None:
                mean = probabilities.to(weight.dtype) @ weight
                slopes[part] = (weight[targets[part]] - mean) / temperature
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (slopes,) = ctx.saved_tensors
        return (gradients[0][:, None] * slopes).to(slopes.dtype), None, None, None, None, None
