"""What each key of a recipe means, from the section classes themselves: type, default, allowed values, help."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from argusrl.config.cluster_sections import QUANTITY
from argusrl.config.sections import Config
from argusrl.errors import ConfigError

ITEM = "*"  # stands for any index of a list, any key of a mapping: rewards.*.weight


@dataclass(frozen=True, slots=True)
class KeyHelp:
    """One key of a recipe."""

    path: str  # dotted, e.g. "rewards.*.weight"
    type: str  # in words
    required: bool
    default: Any  # JSON-like; None where required
    choices: tuple[str, ...]
    help: str


def keys() -> Iterator[KeyHelp]:
    """Every key of a recipe in the order of the sections."""
    yield from _keys(Config, ())


def _keys(model: type[BaseModel], prefix: tuple[str, ...]) -> Iterator[KeyHelp]:
    for name, field in model.model_fields.items():
        section, many = section_of(field.annotation)
        path = (*prefix, name)
        if section is None:
            yield _key_help(path, field)
        else:
            yield from _keys(section, (*path, ITEM) if many else path)


def _key_help(path: tuple[str, ...], field: FieldInfo) -> KeyHelp:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return KeyHelp(
        path=".".join(path),
        type=describe(field.annotation, field.metadata),
        required=field.is_required(),
        default=str(default) if isinstance(default, Path) else default,
        choices=tuple(_choices(field.annotation)),
        help=field.description or "",
    )


def section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section class in an annotation, and whether it is a list of them; (None, False) for a plain value."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return section_of(arguments[0])[0], section_of(arguments[0])[0] is not None
    if origin in (types.UnionType, typing.Union):
        found = [section_of(argument) for argument in arguments if argument is not type(None)]
        return found[0] if len(found) == 1 else (None, False)
    return None, False


def _choices(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is Literal:
        return [str(value) for value in typing.get_args(annotation)]
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return [choice for argument in typing.get_args(annotation) for choice in _choices(argument)]
    return []


_PLAIN = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}


def describe(annotation: Any, metadata: list[Any] | None = None) -> str:
    """An annotation in words: "a whole number of at least 1", "one of lora, full", "text or nothing (null)"."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return describe(arguments[0], [*annotation.__metadata__, *(metadata or [])])
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(str(value) for value in arguments)
    if origin in (types.UnionType, typing.Union):
        parts = [describe(argument, metadata) for argument in arguments if argument is not type(None)]
        parts += ["nothing (null)"] if type(None) in arguments else []
        return " or ".join(dict.fromkeys(parts))
    if origin is list:
        words = "sections" if section_of(arguments[0])[0] else f"values, each {describe(arguments[0])}"
        return f"a list of {words}" + (" (at least one)" if _bound(metadata, "min_length") else "")
    if origin is dict:
        return "a mapping" if arguments[1] is Any else f"a mapping of names to values, each {describe(arguments[1])}"
    if origin is tuple:
        return f"a list of {len(arguments)} values, each {describe(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a section with the keys {', '.join(annotation.model_fields)}"
    return _PLAIN.get(annotation, "any value") + _limits(metadata)


def _limits(metadata: list[Any] | None) -> str:
    low, above, high = (_bound(metadata, name) for name in ("ge", "gt", "le"))
    if low is not None and high is not None:
        return f" from {low:,} to {high:,}"
    if low is not None:
        return f" of at least {low:,}"
    if above is not None:
        return f" above {above:,}"
    pattern = _bound(metadata, "pattern")
    if pattern == QUANTITY:
        return " such as 16Gi, 16G or 500M"
    return f" that matches {pattern}" if pattern else ""


def _bound(metadata: list[Any] | None, name: str) -> Any:
    for item in metadata or []:
        nested = _bound(getattr(item, "metadata", None), name)
        value = getattr(item, name, None) if nested is None else nested
        if value is not None:
            return value
    return None


def at(path: list[str | int]) -> tuple[Any, list[Any], str]:
    """Annotation, constraints and help of what a path of a recipe leads to; the annotation is Any where it is open."""
    annotation: Any = Config
    metadata: list[Any] = []
    text = ""
    for part in path:
        section, many = section_of(annotation)
        if section is not None and not many:
            field = section.model_fields.get(str(part))
            if field is None:
                return Any, [], ""
            annotation, metadata, text = field.annotation, field.metadata, field.description or ""
            continue
        annotation, metadata = _item(annotation, part), []
    return annotation, metadata, text


def _item(annotation: Any, part: str | int) -> Any:
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        open_ended = [a for a in typing.get_args(annotation) if typing.get_origin(a) in (list, dict, tuple)]
        annotation = open_ended[0] if open_ended else Any
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is list:
        return arguments[0]
    if typing.get_origin(annotation) is dict:
        return arguments[1]
    if typing.get_origin(annotation) is tuple and isinstance(part, int) and part < len(arguments):
        return arguments[part]
    return Any


def suggestions(unknown: str, limit: int = 1) -> list[str]:
    """Known dotted keys and sections that look like `unknown`: first in the same section, then anywhere.

    Last words are compared: what stands before them is the same in a whole section, and makes anything look close.
    """
    leaves = [key.path for key in keys()]
    parts = [leaf.split(".") for leaf in leaves]
    sections = [".".join(words[:end]) for words in parts for end in range(1, len(words))]
    names = list(dict.fromkeys([*leaves, *(name for name in sections if not name.endswith(ITEM))]))
    section, _, word = unknown.rpartition(".")
    words = {name.rpartition(".")[2]: name for name in reversed(names)}
    siblings = {last: name for name in names for before, _, last in [name.rpartition(".")] if before == section}
    close = [siblings[match] for match in difflib.get_close_matches(word, list(siblings), n=limit, cutoff=0.6)]
    close += [name for name in names if name.rpartition(".")[2] == word and word]
    close += [words[match] for match in difflib.get_close_matches(word, list(words), n=limit, cutoff=0.8)]
    close += difflib.get_close_matches(unknown, names, n=limit, cutoff=0.9)
    return list(dict.fromkeys(close))[:limit]


def explain(dotted: str) -> list[KeyHelp]:
    """Help for one key, or for every key of a section. A list index stands for any. Raises ConfigError if unknown."""
    parts = [ITEM if part.isdigit() else part for part in dotted.strip(".").split(".")]
    for wanted in (parts, [*parts[:1], ITEM, *parts[1:]]):
        name = ".".join(wanted)
        found = [key for key in keys() if key.path == name or key.path.startswith(f"{name}.")]
        if found:
            return found
    close = suggestions(".".join(parts), limit=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"sections: {', '.join(Config.model_fields)}"
    raise ConfigError(f"unknown key: {dotted}", hint)


def schema() -> dict[str, Any]:
    """JSON schema of a recipe (for editors), `base:` included."""
    result = Config.model_json_schema()
    text = {"type": "string"}
    result["properties"]["base"] = {
        "anyOf": [text, {"type": "array", "items": text}],
        "description": "Recipes to start from, relative to this file; what is given here wins.",
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result}
