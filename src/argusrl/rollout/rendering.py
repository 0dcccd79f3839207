"""Messages to token ids, through the model's own chat template and processor, append-only across turns.

The reply of a turn is never decoded and encoded again: turn k is rendered as what comes *after* the sampled ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from argusrl.config.sections import ModelSection
from argusrl.data.images import decode
from argusrl.errors import ModelError
from argusrl.types import Image, Message

_REPLY = "argusrl-reply"  # stands for a reply whose ids are already known; no template treats it specially
_REMEMBERED_SIZES = 1024  # of images


class RenderingRefused(Exception):
    """These messages cannot be shown to the model: placeholders in the text, or images the processor does not take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """Token ids of some messages, generation prompt included."""

    collapsed_ids: tuple[int, ...]  # one placeholder per image (engine)
    expanded_ids: tuple[int, ...]  # as many as the image has tokens (trainer)
    images: tuple[Image, ...]
    image_patches: int  # before merging


@dataclass(frozen=True, slots=True)
class _Expansion:
    """What the processor makes of a text or a placeholder: all its tokens, and patches before merging."""

    ids: tuple[int, ...]
    patches: int


class Renderer:
    """Renders with the processor of `path` (text-only models: with its tokenizer)."""

    def __init__(
        self,
        path: str,
        *,
        revision: str | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        chat_template: Path | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        from transformers import AutoProcessor

        pixels = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        given = {name: value for name, value in pixels.items() if value is not None}
        try:
            self.processor = AutoProcessor.from_pretrained(path, revision=revision, **given)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"cannot load a processor or tokenizer from {path!r}: {error}",
                "model.path must be a folder (or hub id) with tokenizer and processor files",
            ) from error
        self.tokenizer = getattr(self.processor, "tokenizer", self.processor)
        self.shows_images = hasattr(self.processor, "image_processor")
        self.template_options = dict(template_options or {})
        self._expansions: dict[tuple[int, int], _Expansion] = {}  # by width and height
        if chat_template is not None:
            self.processor.chat_template = self.tokenizer.chat_template = chat_template.read_text()
        if not getattr(self.processor, "chat_template", None) and not self.tokenizer.chat_template:
            raise ModelError(f"{path!r} has no chat template", "give one as model.chat_template")
        self.image_token_id = self._image_token_id()
        self.end_ids = self._end_ids(path, revision)
        self.end_texts = tuple(self.tokenizer.convert_ids_to_tokens(list(self.end_ids)))
        try:
            self.following([Message(role="user", content=("?",))], ended=True)
        except (RenderingRefused, ValueError) as error:
            raise ModelError(
                f"the chat template of {path!r} cannot be used: {error}", "give another as model.chat_template"
            ) from error

    @classmethod
    def of(cls, section: ModelSection) -> Renderer:
        """The renderer of a recipe. Raises ModelError."""
        return cls(
            section.path,
            revision=section.revision,
            min_pixels=section.min_pixels,
            max_pixels=section.max_pixels,
            chat_template=section.chat_template,
            template_options=section.chat_template_options,
        )

    def _image_token_id(self) -> int | None:
        if not self.shows_images:
            return None
        token = getattr(self.processor, "image_token_id", None)
        if token is None:
            token = self.tokenizer.convert_tokens_to_ids(self.processor.image_token)
        return int(token)

    def _end_ids(self, path: str, revision: str | None) -> tuple[int, ...]:
        from transformers import GenerationConfig

        ends = {self.tokenizer.eos_token_id}
        try:
            configured = GenerationConfig.from_pretrained(path, revision=revision).eos_token_id
        except OSError:
            configured = None
        if configured is not None:
            ends.update([configured] if isinstance(configured, int) else configured)
        return tuple(sorted(end for end in ends if end is not None))

    @cached_property
    def placeholder_texts(self) -> tuple[str, ...]:
        """Texts that would turn into vision tokens if they stood in a question."""
        return tuple(text for text, _ in self._vision_tokens())

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Vision and padding tokens: must never be sampled (a sampled one steals the next image's slot)."""
        banned = {token for _, token in self._vision_tokens()}
        if self.tokenizer.pad_token_id is not None:
            banned.add(self.tokenizer.pad_token_id)
        return tuple(sorted(banned - set(self.end_ids)))

    def _vision_tokens(self) -> list[tuple[str, int]]:
        if not self.shows_images:
            return []
        marks = ("vision", "image", "video")
        added = self.tokenizer.get_added_vocab().items()
        return [
            (text, token)
            for text, token in added
            if token == self.image_token_id or any(mark in text for mark in marks)
        ]

    def first(self, messages: Sequence[Message]) -> Rendered:
        """The start of an episode. Raises RenderingRefused."""
        return self._tokenize(self._template(messages), messages)

    def following(self, messages: Sequence[Message], *, ended: bool) -> Rendered:
        """What comes after a reply; `ended`: its last id is an end token. Raises RenderingRefused."""
        known = [Message(role="user", content=("?",)), Message(role="assistant", content=(_REPLY,))]
        text = self._template([*known, *messages])
        if _REPLY not in text:
            raise RenderingRefused("the chat template leaves out the replies of earlier turns")
        rest = text[text.index(_REPLY) + len(_REPLY) :]
        if ended:  # the reply's own end token is among its ids
            rest = rest[max((len(end) for end in self.end_texts if rest.startswith(end)), default=0) :]
        return self._tokenize(rest, messages)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a reply without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Expanded length of `first(messages)`, from image sizes alone (nothing is decoded)."""
        collapsed = self.tokenizer(self._template(messages), add_special_tokens=False)["input_ids"]
        return len(collapsed) + sum(self._image_tokens(image) - 1 for message in messages for image in message.images)

    def _image_tokens(self, image: Image) -> int:
        processor = self.processor.image_processor
        try:
            patches = processor.get_number_of_image_patches(image.height, image.width, {})
        except ValueError as error:  # e.g. a strip so narrow that it would vanish when scaled
            raise RenderingRefused(f"an image of {image.width} x {image.height} pixels: {error}") from error
        return int(patches // getattr(processor, "merge_size", 1) ** 2)

    def _template(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        template = self.processor if getattr(self.processor, "chat_template", None) else self.tokenizer
        chat = [self._chat(message) for message in messages]
        try:
            text = template.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, **self.template_options
            )
        except TemplateError as error:  # templates refuse roles and orders they do not know by raising
            raise RenderingRefused(f"the chat template refuses these messages: {error}") from error
        return str(text)

    def _chat(self, message: Message) -> dict[str, Any]:
        for part in message.content:
            found = [] if isinstance(part, Image) else [text for text in self.placeholder_texts if text in part]
            if found:
                raise RenderingRefused(f"the text contains {', '.join(found)}, a placeholder of the model")
        if not message.images:  # plain text is what every template understands
            return {"role": message.role, "content": "".join(str(part) for part in message.content)}
        if not self.shows_images:
            raise RenderingRefused("the prompt has an image but the model reads text only")
        parts = [{"type": "image"} if isinstance(p, Image) else {"type": "text", "text": p} for p in message.content]
        return {"role": message.role, "content": parts}

    def _tokenize(self, text: str, messages: Sequence[Message]) -> Rendered:
        images = tuple(image for message in messages for image in message.images)
        collapsed = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        placeholders = collapsed.count(self.image_token_id) if self.image_token_id is not None else 0
        if placeholders != len(images):
            raise RenderingRefused(f"the chat template makes {placeholders} placeholders of {len(images)} images")
        if not images:
            return Rendered(collapsed_ids=collapsed, expanded_ids=collapsed, images=(), image_patches=0)
        if all(_size(image) in self._expansions for image in images):
            processed = self._expanded(collapsed, images)
        else:
            processed = self._process(text, images)
            self._learn(images, collapsed, processed)
        return Rendered(
            collapsed_ids=collapsed, expanded_ids=processed.ids, images=images, image_patches=processed.patches
        )

    def _process(self, text: str, images: Sequence[Image]) -> _Expansion:
        """What the model's processor makes of a text with these images."""
        try:
            inputs = self.processor(text=[text], images=[decode(image) for image in images], add_special_tokens=False)
        except ValueError as error:
            raise RenderingRefused(f"the processor refuses these images: {error}") from error
        grid = inputs.get("image_grid_thw")
        patches = sum(int(t) * int(h) * int(w) for t, h, w in grid) if grid is not None else len(images)
        return _Expansion(tuple(int(token) for token in inputs["input_ids"][0]), patches)

    def _learn(self, images: Sequence[Image], collapsed: Sequence[int], processed: _Expansion) -> None:
        """Remember what images of these sizes expand to, so that pixels need not be processed only to count tokens.

        Nothing is remembered where `processed`, the processor's own work, cannot be put together from it.
        """
        placeholder = self.tokenizer.convert_ids_to_tokens(self.image_token_id)
        unknown = {_size(image): image for image in images if _size(image) not in self._expansions}
        for size, image in unknown.items():
            self._expansions[size] = self._process(placeholder, [image])
        if self._expanded(collapsed, images) != processed:
            for size in unknown:
                del self._expansions[size]
        while len(self._expansions) > _REMEMBERED_SIZES:
            del self._expansions[next(iter(self._expansions))]

    def _expanded(self, collapsed: Sequence[int], images: Sequence[Image]) -> _Expansion:
        parts = iter([self._expansions[_size(image)] for image in images])
        ids: list[int] = []
        patches = 0
        for token in collapsed:
            if token == self.image_token_id:
                part = next(parts)
                ids += part.ids
                patches += part.patches
            else:
                ids.append(token)
        return _Expansion(tuple(ids), patches)


def _size(image: Image) -> tuple[int, int]:
    return image.width, image.height
