"""Proof that engines serve the adapter that was just trained: digest in the worker, log-probabilities of a canary.

The canary is one fixed sequence. Under the new adapter engine and trainer must agree on it; where the adapter
changed it visibly, agreeing with the trainer also means disagreeing with the base model and the previous version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argusrl.errors import AdapterRefused
from argusrl.training.engine_worker import EngineProof
from argusrl.types import AdapterRef

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}  # largest |engine - trainer| of one log-probability
_VISIBLE = 4.0  # an effect is visible when it is this many tolerances large


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """How well a version was proven."""

    gap: float  # largest |engine - trainer| on the canary
    by_effect: bool  # False: base or previous version cannot be told apart on the canary ("unproven by effect")


def verify(
    reference: AdapterRef,
    proofs: Sequence[EngineProof],
    *,
    trainer: Sequence[float],
    base: Sequence[float],
    previous: Sequence[float] | None,
    dtype: str,
) -> Verification:
    """Raises AdapterRefused when an engine's digest or canary is not that of `reference`."""
    tolerance = TOLERANCE[dtype]
    gap = 0.0
    for engine, proof in enumerate(proofs):
        if proof.sha256 != reference.sha256:
            raise AdapterRefused(
                f"engine {engine} serves tensors with digest {proof.sha256}, "
                f"version {reference.version} is {reference.sha256}"
            )
        difference = _largest_difference(proof.canary, trainer)
        if not difference <= tolerance:  # NaN must not pass
            raise AdapterRefused(
                f"engine {engine} disagrees with the trainer about version {reference.version}: "
                f"log-probabilities of the canary differ by up to {difference:.3g} (allowed {tolerance:g}); "
                f"from the base model they differ by {_largest_difference(proof.canary, base):.3g}"
            )
        gap = max(gap, difference)
    others = [base] if previous is None else [base, previous]
    visible = all(_largest_difference(trainer, other) > _VISIBLE * tolerance for other in others)
    return Verification(gap=gap, by_effect=visible)


def _largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    if any(difference != difference for difference in differences):
        return float("nan")
    return max(differences, default=0.0)
