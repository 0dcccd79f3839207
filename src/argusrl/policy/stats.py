"""What a rank answers to the driver: scalars only. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Where NaN or Inf was first seen: in the earliest micro-batch, there on the lowest rank."""

    rank: int
    micro_batch: int  # position in what the rank was handed (for models that cannot pack: of the row)
    what: str  # "advantage" | "engine log-probability" | "log-probability" | "loss" | "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """One forward and backward over an update, the same on all ranks. Means are over computed response tokens."""

    tokens: int  # response tokens computed; 0 where no group of the update had signal
    row_tokens: int  # tokens of the computed rows, each row's own
    loss: float  # with the update's own denominator
    entropy: float  # nats, of the sampling distribution
    ratio: float  # mean new / old probability
    clip_share: float
    cut_share: float  # importance weights cut at the cap
    clamped_tokens: int  # log-ratios beyond ±20
    gap_mean: float  # |trainer - engine| log-probabilities before the update
    gap_max: float
    kl: float = 0.0  # mean k3 estimate to the reference, in nat; 0 where kl_weight is
    broken: Broken | None = None  # optimizer_step will update nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """One optimizer step. `skipped` says why nothing was updated; the optimizer's state is then untouched."""

    grad_norm: float  # before clipping; may be NaN or Inf where skipped
    learning_rate: float
    skipped: str | None = None  # "no signal" | "non-finite " and a word of Broken.what
    broken: Broken | None = None  # where it began; None, too, where only the sum of finite gradients overflowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What all ranks pushed through the model in a step, and the least that would have done.

    The least: each group's tokens as a tree that holds every shared beginning once; each different image once.
    """

    tokens: int  # through the language model, training passes only
    row_tokens: int  # had each row been computed alone
    unique_tokens: int  # the least
    patches: int  # through the vision tower
    row_patches: int  # had each row been computed alone
    unique_patches: int  # the least
    places: int  # of attention's queries
    padding: int  # of them, without a token
