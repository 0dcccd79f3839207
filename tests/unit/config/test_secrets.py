from __future__ import annotations

from pathlib import Path

import pytest

from argusrl.config.secrets import resolve_environment, resolve_secret, resolved_secrets
from argusrl.errors import ConfigError


def test_references_are_read_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE", " from-environment\n")
    (tmp_path / "key").write_text("from-file\n")
    assert resolve_secret("env:SERVICE") == "from-environment"
    assert resolve_secret(f"file:{tmp_path / 'key'}") == "from-file"
    assert {"from-environment", "from-file"} <= resolved_secrets()
    assert resolve_environment({"A": "env:SERVICE", "B": "plain"}) == {"A": "from-environment", "B": "plain"}


def test_errors_name_the_reference_and_never_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ABSENT", raising=False)
    for reference in ("env:ABSENT", f"file:{tmp_path / 'none'}", f"file:{tmp_path}"):
        with pytest.raises(ConfigError, match=reference):
            resolve_secret(reference)
    with pytest.raises(ConfigError) as caught:
        resolve_secret("sk-live-123456")
    assert "sk-live" not in str(caught.value)
