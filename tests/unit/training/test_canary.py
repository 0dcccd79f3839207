from __future__ import annotations

import pytest

from argusrl.errors import AdapterRefused, NumericsError
from argusrl.training.canary import verify
from argusrl.training.engine_worker import EngineProof
from argusrl.types import AdapterRef

REF = AdapterRef(version=3, epoch=1, path="adapters/v000003.e0001", sha256="new", file_sha256="f")
BASE, OLD, NEW = [-1.0, -2.0], [-1.1, -2.2], [-1.2, -2.4]


def check(engine, *, sha256="new", base=BASE, previous=OLD, dtype="float32"):
    proofs = [
        EngineProof(engine=0, sha256="new", canary=NEW),
        EngineProof(engine=1, sha256=sha256, canary=engine),
    ]
    return verify(REF, proofs, trainer=NEW, base=base, previous=previous, dtype=dtype)


def test_an_engine_that_agrees_is_proven_by_effect():
    verification = check([-1.2 + 1e-6, -2.4])
    assert verification.by_effect
    assert verification.gap == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize("stale", [BASE, OLD, [float("nan"), -2.4], [-1.2, float("-inf")]])
def test_base_previous_version_and_nonsense_are_refused(stale):
    with pytest.raises(AdapterRefused, match="engine 1"):
        check(stale)


def test_another_digest_is_refused_whatever_the_canary_says():
    with pytest.raises(AdapterRefused, match="digest old"):
        check(NEW, sha256="old")


@pytest.mark.parametrize(("base", "previous"), [(NEW, OLD), (BASE, NEW), (BASE, [-1.2 + 2e-4, -2.4])])
def test_a_change_too_small_to_see_is_unproven_by_effect(base, previous):
    assert not check(NEW, base=base, previous=previous).by_effect


def test_bfloat16_allows_for_its_rounding():
    assert check([-1.25, -2.4], dtype="bfloat16").gap == pytest.approx(0.05)
    with pytest.raises(AdapterRefused):
        check([-1.5, -2.4], dtype="bfloat16")


def test_one_rare_token_in_bfloat16_is_no_reason_to_refuse_but_far_off_is():
    def off_by(difference):
        trainer = [-1.0] * 16
        proof = EngineProof(engine=0, sha256="new", canary=[-1.0 - difference, *trainer[1:]])
        return verify(REF, [proof], trainer=trainer, base=[-2.0] * 16, previous=None, dtype="bfloat16")

    assert off_by(0.4).by_effect
    with pytest.raises(AdapterRefused, match=r"up to 0.6 \(allowed 0.5\)"):
        off_by(0.6)


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_a_trainer_that_has_no_number_is_not_blamed_on_engines(number):
    proofs = [EngineProof(engine=0, sha256="new", canary=[number, -2.4])]
    with pytest.raises(NumericsError, match=r"version 3 .* not finite"):
        verify(REF, proofs, trainer=[number, -2.4], base=BASE, previous=OLD, dtype="float32")


def test_the_first_version_has_only_the_base_to_differ_from():
    proofs = [EngineProof(engine=0, sha256="new", canary=BASE)]
    assert not verify(REF, proofs, trainer=BASE, base=BASE, previous=None, dtype="float32").by_effect
    assert check(NEW, previous=None).by_effect
