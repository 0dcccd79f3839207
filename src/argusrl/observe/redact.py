"""Masks secrets in whatever is about to be shown or written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from argusrl.config.secrets import SECRET_NAME, resolved_secrets

MASK = "•••"
_SHORTEST = 6  # characters; masking "1" or "yes" would eat ordinary text


class Redactor:
    """Replaces secret values by a mask: those read through references in this process, and given ones.

    Values of environment variables that are named like secrets (HF_TOKEN, WANDB_API_KEY, …) are masked, too.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._own = set(secrets)

    def text(self, text: str) -> str:
        """`text` with every secret masked."""
        for secret in sorted(self._secrets(), key=len, reverse=True):
            text = text.replace(secret, MASK)
        return text

    def value(self, value: Any) -> Any:
        """The same for strings at any depth of mappings, lists and tuples."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value

    def _secrets(self) -> set[str]:
        environment = {value for name, value in os.environ.items() if SECRET_NAME.search(name)}
        guessed = {value for value in environment if len(value) >= _SHORTEST}
        return {secret for secret in self._own | resolved_secrets() if secret} | guessed
