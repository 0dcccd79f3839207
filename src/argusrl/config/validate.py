"""From plain values to a Config: every mistake at once, in words, with what was given and what would be right."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from argusrl.config import explain
from argusrl.config.secrets import SECRET_NAME
from argusrl.config.sections import Config
from argusrl.errors import ConfigError

_MISSING = object()


def validate(values: dict[str, Any]) -> Config:
    """Build the Config. Types are strict: "8" is not 8, true is not 1. Raises ConfigError with all problems."""
    for name, field in Config.model_fields.items():
        section, many = explain.section_of(field.annotation)
        if section is not None and not many and name in values and values[name] is None:
            values = {**values, name: {}}  # `observe:` with nothing under it
    try:
        # In JSON mode a strict model takes text for a path and a list for a tuple, and nothing else is converted.
        return Config.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        found = dict.fromkeys(text for details in error.errors() for text in _problems(details, values))
        whole = {text.partition(": ")[0] for text in found}
        problems = [text for text in found if not _inside(text.partition(": ")[0], whole)]
        raise ConfigError(problems, "argusrl config explain KEY tells what a key takes") from None


def _inside(dotted: str, reported: set[str]) -> bool:
    parts = dotted.split(".")
    return any(".".join(parts[:end]) in reported for end in range(1, len(parts)))


def _problems(details: ErrorDetails, values: dict[str, Any]) -> list[str]:
    path, value = _locate(details, values)
    dotted = ".".join(str(part) for part in path)
    annotation, metadata, text = explain.at(path)
    if details["type"] == "extra_forbidden":
        close = explain.suggestions(_generic(path))
        return [f"{dotted}: unknown key" + (f"; did you mean {close[0]}?" if close else "")]
    expected = explain.describe(annotation, metadata)
    if value is _MISSING:
        section, many = explain.section_of(annotation)
        if section is not None and not many:
            required = [(name, field) for name, field in section.model_fields.items() if field.is_required()]
            if not required:
                return [f"{dotted}: missing section"]
            return [_missing(f"{dotted}.{name}", field.description) for name, field in required]
        return [_missing(dotted, text) if not many else f"{dotted}: missing; must be {expected}"]
    return [f"{dotted}: must be {expected}, got {shown(path, value)}"]


def _missing(dotted: str, text: str | None) -> str:
    return f"{dotted}: missing" + (f" ({text.rstrip('.')})" if text else "")


def _locate(details: ErrorDetails, values: dict[str, Any]) -> tuple[list[str | int], Any]:
    """The error's path without the tags pydantic adds for members of a union, and the value found there."""
    path: list[str | int] = []
    value: Any = values
    location = details["loc"]
    for position, part in enumerate(location):
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and _has(value, part)):
            path.append(part)
            value = value[part]  # type: ignore[index]
        elif position == len(location) - 1 and details["type"] == "missing" and isinstance(value, dict):
            return [*path, part], _MISSING
    return path, value


def _has(items: list[Any], part: str | int) -> bool:
    return isinstance(part, int) and part < len(items)


def _generic(path: list[str | int]) -> str:
    return ".".join(explain.ITEM if isinstance(part, int) else part for part in path)


def shown(path: list[str | int], value: Any) -> str:
    """A value as JSON, shortened; hidden where it may be a secret."""
    names = [str(part) for part in path]
    if any(SECRET_NAME.search(name) for name in names) or names[:2] == ["cluster", "environment"]:
        return "a value that is not shown"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"
