"""Secrets are references in a recipe, env:NAME or file:PATH; values are read where they are needed, never stored.

Every value read in this process is remembered (in memory) so that logs and errors can be masked.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from argusrl.errors import ConfigError

SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(API|ACCESS|PRIVATE)_?KEY)$", re.IGNORECASE)
"""Names of keys and environment variables whose values are secrets: HF_TOKEN, api_key; not max_tokens."""

_resolved: set[str] = set()


def is_secret_reference(text: str) -> bool:
    """True for env:NAME and file:PATH."""
    kind, _, rest = text.partition(":")
    return kind in ("env", "file") and bool(rest.strip())


def resolve_secret(reference: str) -> str:
    """The value behind env:NAME or file:PATH (surrounding white space removed).

    Raises ConfigError that names the reference, never a value.
    """
    if not is_secret_reference(reference):
        raise ConfigError(
            "a secret is given in clear text", "write env:NAME or file:PATH instead, and rotate the secret"
        )
    kind, _, rest = reference.partition(":")
    if kind == "env":
        value = os.environ.get(rest, "").strip()
        if not value:
            raise ConfigError(f"secret {reference}: the environment variable is not set", f"export {rest}=…")
    else:
        try:
            value = Path(rest).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"secret {reference}: cannot be read: {reason}") from None
        if not value:
            raise ConfigError(f"secret {reference}: the file is empty")
    _resolved.add(value)
    return value


def resolve_environment(variables: dict[str, str]) -> dict[str, str]:
    """`cluster.environment` with its references replaced by values; other values stay as they are."""
    return {name: resolve_secret(value) if is_secret_reference(value) else value for name, value in variables.items()}


def resolved_secrets() -> frozenset[str]:
    """Every secret value this process has read, for masking."""
    return frozenset(_resolved)
