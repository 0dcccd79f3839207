"""Proof that engines serve the adapter that was just trained: digest in the worker, log-probabilities of a canary.

The canary is one fixed sequence. Under the new adapter engine and trainer must agree on it; where the adapter
changed it visibly, agreeing with the trainer also means disagreeing with the base model and the previous version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from argusrl.errors import AdapterRefused, NumericsError
from argusrl.training.engine_worker import EngineProof
from argusrl.types import AdapterRef

_VISIBLE = 4.0  # an effect is visible when it is this many tolerances large


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far engine and trainer may be apart, |difference| of log-probabilities in nats."""

    largest: float  # of one token
    mean: float  # over the canary

    def times(self, difference: Difference) -> float:
        """The difference in tolerances: at most 1 is agreement. NaN where a log-probability is."""
        return max(difference.largest / self.largest, difference.mean / self.mean)


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two lists of log-probabilities."""

    largest: float
    mean: float

    @classmethod
    def between(cls, one: Sequence[float], other: Sequence[float]) -> Difference:
        differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
        if any(difference != difference for difference in differences):
            return cls(math.nan, math.nan)
        return cls(max(differences, default=0.0), sum(differences) / max(1, len(differences)))


# Two kernels round bfloat16 differently, and over many layers a rare token is now and then off by tenths: the largest
# difference is a coarse limit there and the mean, which such a token hardly moves, the fine one.
TOLERANCE = {"float32": Tolerance(1e-4, 1e-4), "bfloat16": Tolerance(0.5, 0.05)}


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
    """Raises AdapterRefused when an engine's digest or canary is not that of `reference`.

    Raises NumericsError when the trainer's own canary is not finite: then there is nothing to agree with.
    """
    if not all(map(math.isfinite, trainer)):
        raise NumericsError(
            f"under version {reference.version} the log-probabilities of the canary are not finite",
            "lower optimizer.learning_rate: finite weights have become too large to compute with",
        )
    tolerance = TOLERANCE[dtype]
    gap = 0.0
    for proof in proofs:
        if proof.sha256 != reference.sha256:
            raise _refused(
                proof, f"serves tensors with digest {proof.sha256}, version {reference.version} is {reference.sha256}"
            )
        difference = Difference.between(proof.canary, trainer)
        if not tolerance.times(difference) <= 1:  # NaN must not pass
            raise _refused(
                proof,
                f"disagrees with the trainer about version {reference.version}: "
                f"log-probabilities of the canary differ by up to {difference.largest:.3g} "
                f"(allowed {tolerance.largest:g}), {difference.mean:.3g} in the mean (allowed {tolerance.mean:g}); "
                f"from the base model they differ by up to {Difference.between(proof.canary, base).largest:.3g}",
            )
        gap = max(gap, difference.largest)
    others = [base] if previous is None else [base, previous]
    visible = all(tolerance.times(Difference.between(trainer, other)) > _VISIBLE for other in others)
    return Verification(gap=gap, by_effect=visible)


def _refused(proof: EngineProof, reason: str) -> AdapterRefused:
    return AdapterRefused(f"engine {proof.engine} {reason}").of(f"engine {proof.engine}")
