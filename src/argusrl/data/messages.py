"""From the raw prompt and images of a row to validated chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argusrl.config.sections import DataSection
from argusrl.data.formats import RowParts, plain
from argusrl.data.images import validate_image
from argusrl.errors import DataError
from argusrl.types import Image, Message, Prompt

IMAGE_MARKER = "<image>"
_ROLES = ("system", "user", "assistant")
_PAYLOAD_KEYS = ("image", "image_url", "url", "bytes", "path", "data", "base64")


class _Slot:
    """Where an image of the images column belongs."""


_SLOT = _Slot()


@dataclass(frozen=True, slots=True)
class _Embedded:
    """An image that the message itself carries."""

    value: Any


_Part = str | _Slot | _Embedded
_Draft = tuple[str, list[_Part]]


def build_prompt(parts: RowParts, *, id: str, section: DataSection, base: Path | None = None) -> Prompt:
    """The Prompt of a row: images in their places and validated, system prompt and suffix added.

    Raises DataError that says what is wrong with the row (the caller adds which row it is).
    """
    drafts = [_draft(message) for message in _as_chat(parts.prompt)]
    if drafts[-1][0] != "user":
        raise DataError(f"the prompt ends with a message of the {drafts[-1][0]}, not of the user")
    if not any(
        isinstance(part, str) and part.strip() for role, content in drafts for part in content if role == "user"
    ):
        raise DataError("empty text")
    images = _as_list(parts.images)
    drafts = _with_slots(drafts, len(images))
    queue = iter(enumerate(_in_order(drafts, images), start=1))
    messages = []
    for role, content in drafts:
        placed: list[str | Image] = []
        for part in content:
            if isinstance(part, str):
                placed.append(part)
            else:
                number, value = next(queue)
                source = f"image {number}"
                placed.append(validate_image(value, max_pixels=section.max_image_pixels, source=source, base=base))
        messages.append(Message(role=role, content=tuple(placed)))
    answer = plain(parts.answer, "answer")
    return Prompt(id=id, messages=decorate(messages, section), answer=answer, info=dict(parts.info))


def decorate(messages: Sequence[Message], section: DataSection) -> tuple[Message, ...]:
    """The messages with `data.system_prompt` before them and `data.suffix` at the end of the last question.

    A system message that the row brings stays, after the recipe's. A space goes between question and suffix where
    neither brings white space.
    """
    result = list(messages)
    if not result:
        return ()
    if section.suffix:
        last = result[-1]
        content = list(last.content)
        end = content[-1] if content else None
        if isinstance(end, str):
            seam = "" if end[-1:].isspace() or section.suffix[:1].isspace() or not end else " "
            content[-1] = end + seam + section.suffix
        else:
            content.append(section.suffix)
        result[-1] = Message(role=last.role, content=tuple(content))
    if section.system_prompt:
        if result[0].role == "system":
            own = result.pop(0).content
            result.insert(0, Message(role="system", content=(section.system_prompt + "\n\n", *own)))
        else:
            result.insert(0, Message(role="system", content=(section.system_prompt,)))
    return tuple(result)


def text_of(messages: Sequence[Message]) -> str:
    """All text of the messages, one part per line."""
    return "\n".join(part for message in messages for part in message.content if isinstance(part, str))


def _as_chat(prompt: Any) -> list[Any]:
    if prompt is None:
        raise DataError("the prompt is missing (null)")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list | tuple) and prompt:
        return list(prompt)
    raise DataError(f"the prompt is {_short(prompt)}, neither text nor a list of messages")


def _draft(message: Any) -> _Draft:
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise DataError(f"the message {_short(message)} has no role and content")
    role = message["role"]
    if role not in _ROLES:
        raise DataError(f"role '{role}' is none of {', '.join(_ROLES)}")
    content = message["content"]
    if isinstance(content, str):
        return role, _split(content)
    if not isinstance(content, list | tuple):
        raise DataError(f"the content {_short(content)} is neither text nor a list of parts")
    return role, [piece for part in content for piece in _piece(part)]


def _piece(part: Any) -> list[_Part]:
    if isinstance(part, str):
        return _split(part)
    if not isinstance(part, Mapping):
        raise DataError(f"the part {_short(part)} is neither text nor a mapping with a type")
    # Parquet gives every part of a column all keys, most of them null, so the type decides.
    kind = part.get("type")
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise DataError(f"the text of the part {_short(part)} is no text")
        return _split(text)
    if kind in ("image", "image_url", "input_image"):
        value = next((part[key] for key in _PAYLOAD_KEYS if part.get(key) is not None), None)
        return [_SLOT if value is None else _Embedded(value)]
    raise DataError(f"a part of type '{kind}' is neither text nor image")


def _split(text: str) -> list[_Part]:
    pieces: list[_Part] = []
    for index, segment in enumerate(text.split(IMAGE_MARKER)):
        if index:
            pieces.append(_SLOT)
        if segment:
            pieces.append(segment)
    return pieces


def _with_slots(drafts: list[_Draft], images: int) -> list[_Draft]:
    """The drafts with exactly one slot per image of the images column. Raises DataError where that cannot be."""
    slots = sum(part is _SLOT for _, content in drafts for part in content)
    embedded = sum(isinstance(part, _Embedded) for _, content in drafts for part in content)
    if slots == images:
        return drafts
    if images == 0 and slots == embedded:  # the text still names the images that the message carries as parts
        return [(role, [part for part in content if part is not _SLOT]) for role, content in drafts]
    if slots == 0 and images:
        first = next(index for index, (role, _) in enumerate(drafts) if role == "user")
        role, content = drafts[first]
        return [*drafts[:first], (role, [*[_SLOT] * images, *content]), *drafts[first + 1 :]]
    raise DataError(f"{slots} {IMAGE_MARKER} markers, but {images} images")


def _in_order(drafts: list[_Draft], images: list[Any]) -> list[Any]:
    from_column = iter(images)
    return [
        part.value if isinstance(part, _Embedded) else next(from_column)
        for _, content in drafts
        for part in content
        if not isinstance(part, str)
    ]


def _as_list(images: Any) -> list[Any]:
    if images is None:
        return []
    return list(images) if isinstance(images, list | tuple) else [images]


def _short(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, str | int | float | bool) else json.dumps(value, default=repr)[:80]
