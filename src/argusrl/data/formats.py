"""From a row of a file to the parts of a Prompt: own column mapping, and the layouts of other projects.

verl    data_source, prompt (chat), images (optional), ability, reward_model {style, ground_truth}, extra_info
skyrl   data_source, prompt (chat, images as image_url parts), env_class, reward_spec {method, ground_truth}, …
trl     prompt (text or chat), image or images, solution or answer; every other column goes to the rewards
"""

from __future__ import annotations

import datetime
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from argusrl.config.sections import DataSection
from argusrl.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParts:
    """What a format finds in a row; nothing is checked yet."""

    prompt: Any  # text, or a list of chat messages
    images: Any = None  # None, one image or a list of them
    answer: Any = None
    id: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """Which columns a format reads and how."""

    parts: Callable[[Mapping[str, Any]], RowParts]
    required: tuple[str, ...]  # a file without one of these is refused before any row is read
    columns: tuple[str, ...] | None  # the columns that are read; None is all


def row_format(section: DataSection) -> RowFormat:
    """The format that `data.format` and `data.columns` ask for."""
    extra = tuple(section.columns.info)
    if section.format == "columns":
        return _own_columns(section)
    parts, required = {
        "verl": (_verl_parts, ("prompt", "reward_model")),
        "skyrl": (_skyrl_parts, ("prompt", "reward_spec")),
        "trl": (_trl_parts, ("prompt",)),
    }[section.format]

    def with_extra(row: Mapping[str, Any]) -> RowParts:
        found = parts(row)
        info = {**found.info, **{name: plain(row.get(name), name) for name in extra}}
        return RowParts(prompt=found.prompt, images=found.images, answer=found.answer, id=found.id, info=info)

    return RowFormat(parts=with_extra, required=required + extra, columns=None)


def check_columns(wanted: Iterable[str], present: Sequence[str], source: str) -> None:
    """Raises ConfigError with every wanted column that the file lacks, each with its nearest name."""
    problems = []
    for name in wanted:
        if name not in present:
            close = difflib.get_close_matches(name, present, n=1)
            problems.append(f"{source} has no column '{name}'" + (f": did you mean '{close[0]}'?" if close else ""))
    if problems:
        raise ConfigError(problems, f"its columns are: {', '.join(present)}; see data.columns and data.format")


def plain(value: Any, name: str) -> Any:
    """`value` as JSON-like data: dates become text, decimals numbers, NaN (a table's missing value) None.

    Raises DataError for anything else, e.g. bytes.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, name) for item in value]
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    raise DataError(f"column {name} holds {type(value).__name__}, which is not text, number, list or mapping")


def _own_columns(section: DataSection) -> RowFormat:
    columns = section.columns
    chosen = columns.model_fields_set
    # The defaults `images` and `answer` may be absent (text only; no answer); a column someone named may not.
    optional = {"images": columns.images, "answer": columns.answer, "id": columns.id}
    named = tuple(name for key, name in optional.items() if name and key in chosen)
    extra = tuple(columns.info)

    def parts(row: Mapping[str, Any]) -> RowParts:
        return RowParts(
            prompt=row.get(columns.prompt),
            images=row.get(columns.images) if columns.images else None,
            answer=row.get(columns.answer) if columns.answer else None,
            id=row.get(columns.id) if columns.id else None,
            info={name: plain(row.get(name), name) for name in extra},
        )

    used = tuple(name for name in (columns.prompt, *optional.values(), *extra) if name)
    return RowFormat(parts=parts, required=(columns.prompt, *named, *extra), columns=used)


def _verl_parts(row: Mapping[str, Any]) -> RowParts:
    reward_model = _inner(row, "reward_model")
    kept = ("data_source", "ability", "extra_info")
    return RowParts(
        prompt=row.get("prompt"),
        images=row.get("images"),
        answer=reward_model.get("ground_truth"),
        info=_plain_columns(row, kept),
    )


def _skyrl_parts(row: Mapping[str, Any]) -> RowParts:
    reward_spec = _inner(row, "reward_spec")
    # Every column besides the prompt reaches a SkyRL environment, so task-specific ones are kept.
    kept = [name for name in row if name not in ("prompt", "images", "reward_spec")]
    return RowParts(
        prompt=row.get("prompt"),
        images=row.get("images"),
        answer=reward_spec.get("ground_truth"),
        info=_plain_columns(row, kept),
    )


def _trl_parts(row: Mapping[str, Any]) -> RowParts:
    images = row.get("images") if row.get("images") is not None else row.get("image")
    answer_column = next((name for name in ("solution", "answer", "ground_truth") if row.get(name) is not None), None)
    kept = [name for name in row if name not in ("prompt", "image", "images", answer_column)]
    return RowParts(
        prompt=row.get("prompt"),
        images=images,
        answer=row[answer_column] if answer_column else None,
        info=_plain_columns(row, kept),
    )


def _inner(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"column {name} holds {type(value).__name__}, not a mapping with ground_truth")
    return value


def _plain_columns(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of the columns that are JSON-like; the others (a second image, raw bytes) are of no use to a reward."""
    info: dict[str, Any] = {}
    for name in names:
        if row.get(name) is None:
            continue
        try:
            info[name] = plain(row[name], name)
        except DataError:
            continue
    return info
