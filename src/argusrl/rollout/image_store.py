"""Encoded images an engine has seen, by content, so that later turns need not send them again."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import TYPE_CHECKING

from argusrl.errors import EngineError
from argusrl.rollout.engine import EngineImage

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageStore:
    """Keeps the images used last, up to `capacity_bytes` of encoded data (never less than the newest one)."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._held_bytes = 0
        self._images: OrderedDict[str, bytes] = OrderedDict()

    def data(self, image: EngineImage) -> bytes:
        """The encoded bytes, kept for later. EngineError "unknown image ..." where they were never sent or are gone."""
        held = self._images.get(image.sha256)
        if held is None:
            if image.data is None:
                raise EngineError(f"unknown image {image.sha256}", "send the request again with the image's data")
            held = self._images[image.sha256] = image.data
            self._held_bytes += len(held)
        self._images.move_to_end(image.sha256)
        while self._held_bytes > self._capacity_bytes and len(self._images) > 1:
            _, oldest = self._images.popitem(last=False)
            self._held_bytes -= len(oldest)
        return held

    def open(self, image: EngineImage) -> Image:
        """The image, not decoded yet: vLLM decodes it only where it was not processed before. Raises EngineError."""
        from PIL import Image, UnidentifiedImageError

        try:
            return Image.open(io.BytesIO(self.data(image)))
        except (UnidentifiedImageError, OSError) as error:
            raise EngineError(f"image {image.sha256} cannot be read: {error}") from error
