from __future__ import annotations

import pytest

from argusrl.config.secrets import resolve_secret
from argusrl.observe.redact import MASK, Redactor


def test_secrets_read_in_this_process_are_masked_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", "s3cr3t")
    redactor = Redactor()
    resolve_secret("env:JUDGE")
    assert redactor.text("Bearer s3cr3t!") == f"Bearer {MASK}!"
    assert redactor.value({"s3cr3t": ["x", ("s3cr3t", 3)]}) == {MASK: ["x", [MASK, 3]]}


def test_given_secrets_and_variables_named_like_secrets_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setenv("SHORT_TOKEN", "yes")
    assert Redactor(["longer secret", "secret"]).text("longer secret, hf_abcdef, yes") == f"{MASK}, {MASK}, yes"
