"""Looks at every row once before a run starts, as a stream, and lists all that are unusable."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from argusrl.data.messages import text_of
from argusrl.data.source import GeneratedSource, PromptSource, SelectedSource
from argusrl.errors import DataError
from argusrl.types import Image, Prompt

SHOWN = 20
_PROGRESS_ROWS = 500


@dataclass(frozen=True, slots=True)
class BadRow:
    row: int  # in the file or generator, from 0
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSource:
    """A source of which every row was looked at once."""

    source: PromptSource  # without the bad rows
    bad: tuple[BadRow, ...]  # empty unless data.on_bad_row is skip
    digests: array[int]  # [rows] 64 bits of each prompt's content, for find_overlap


def check_source(
    source: PromptSource,
    *,
    split: str = "train",
    needs_answer: bool = False,
    forbidden: Sequence[str] = (),
    on_bad_row: Literal["error", "skip"] = "error",
    also: Callable[[Prompt], str | None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CheckedSource:
    """Check every row; memory stays at one row plus 24 bytes for each.

    `needs_answer`: a row without an answer is bad. `forbidden`: text with one of these strings is bad (the
    tokenizer's placeholder tokens). `also`: one more check, returns the reason or None, or raises DataError (e.g. the
    prompt's length in tokens). `progress(done, all)` is called now and then.
    Raises DataError: rows are bad and `on_bad_row` is "error" (lists them with their numbers: all counted, the first
    20 shown), no row is left, or a generator does not repeat itself.
    """
    bad: list[BadRow] = []
    good, ids, digests = array("Q"), array("Q"), array("Q")
    for row, found in enumerate(source.scan()):
        reason = found.message if isinstance(found, DataError) else _problem(found, needs_answer, forbidden, also)
        if reason is not None:
            named = isinstance(found, DataError)
            bad.append(BadRow(row, reason if named else f"{split} row {row}: {reason}"))
        elif isinstance(found, Prompt):
            good.append(row)
            ids.append(_digest(found.id.encode()))
            digests.append(_content_digest(found))
        if progress and ((row + 1) % _PROGRESS_ROWS == 0 or row + 1 == len(source)):
            progress(row + 1, len(source))
    repeated = _repeats(ids)
    for place, earlier in repeated.items():
        bad.append(BadRow(good[place], f"{split} row {good[place]}: its id is the id of row {good[earlier]}"))
    bad.sort(key=lambda item: item.row)
    if isinstance(source, GeneratedSource) and good:
        _check_repeatable(source, good[0], digests[0])
    if bad and on_bad_row == "error":
        raise DataError(
            list_bad_rows(bad, len(source), split), "repair them, or leave them out with data.on_bad_row: skip"
        )
    kept = array("Q", [row for place, row in enumerate(good) if place not in repeated])
    if not kept:
        raise DataError(
            f"no usable {split} row is left\n{list_bad_rows(bad, len(source), split)}" if bad else "no rows"
        )
    return CheckedSource(
        source=SelectedSource(source, kept) if bad else source,
        bad=tuple(bad),
        digests=array("Q", [digest for place, digest in enumerate(digests) if place not in repeated]),
    )


def find_overlap(train: CheckedSource, heldout: CheckedSource) -> list[int]:
    """Rows of `heldout` (indices of its source) whose content is also a row of `train`: evaluation flatters there.

    The content of an environment's start is its seed and options.
    """
    import numpy as np

    evaluated, trained = (np.frombuffer(checked.digests, dtype=np.uint64) for checked in (heldout, train))
    rows: list[int] = np.flatnonzero(np.isin(evaluated, trained)).tolist()
    return rows


def _problem(
    prompt: Prompt, needs_answer: bool, forbidden: Sequence[str], also: Callable[[Prompt], str | None] | None
) -> str | None:
    text = text_of(prompt.messages)
    for literal in forbidden:
        if literal in text:
            return f"the text contains the literal token {literal}"
    if needs_answer and _is_blank(prompt.answer):
        return "no answer"
    try:
        return also(prompt) if also else None
    except DataError as error:
        return error.message


def _is_blank(answer: Any) -> bool:
    return answer is None or answer == [] or answer == {} or (isinstance(answer, str) and not answer.strip())


def _repeats(ids: array[int]) -> dict[int, int]:
    """Places whose id stood at an earlier place, and that place."""
    import numpy as np

    if not ids:
        return {}
    _, first, inverse = np.unique(np.frombuffer(ids, dtype=np.uint64), return_index=True, return_inverse=True)
    earliest = first[inverse]
    places = np.flatnonzero(earliest != np.arange(len(ids)))
    return dict(zip(places.tolist(), earliest[places].tolist(), strict=True))


def _check_repeatable(source: GeneratedSource, row: int, digest: int) -> None:
    if _content_digest(source[row]) != digest:
        raise DataError(
            f"prompt {row} of the generator is another one on the second call",
            "it must depend on (index, split, options) alone: seed a local random generator with them",
        )


def _content_digest(prompt: Prompt) -> int:
    if not prompt.messages:
        return _digest(repr(sorted(prompt.info.items())).encode())
    digest = hashlib.blake2b(digest_size=8)
    for message in prompt.messages:
        digest.update(b"\x00" + message.role.encode())
        for part in message.content:
            digest.update(b"\x01" + part.sha256.encode() if isinstance(part, Image) else b"\x02" + part.encode())
    digest.update(b"\x03" + repr(prompt.answer).encode())
    return int.from_bytes(digest.digest(), "big")


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def list_bad_rows(bad: Sequence[BadRow], total: int, split: str) -> str:
    """What a user sees: how many of `total` rows are bad, and the first 20 of them, one a line."""
    lines = [f"{len(bad):,} of {total:,} {split} rows cannot be used:"]
    lines += [f"  {item.reason}" for item in bad[:SHOWN]]
    if len(bad) > SHOWN:
        lines.append(f"  … and {len(bad) - SHOWN:,} more")
    return "\n".join(lines)
