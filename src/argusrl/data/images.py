"""Images are decoded once, made canonical (RGB, upright, 8 bits) and from then on addressed by their content."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from PIL import Image as Pillow
from PIL import ImageOps

from argusrl.errors import DataError
from argusrl.types import Image, Prompt

MIN_SIDE_PIXELS = 2
MAX_ASPECT_RATIO = 200  # longer images are refused by the image processors of the Qwen family
MAX_ENCODED_BYTES = 256 << 20
_ORIENTATION_TAG = 0x0112
_KNOWN_CLEAN_ENTRIES = 16_384


class _KnownClean:
    """Sizes of images that were decoded before and kept as they are, by digest: no bytes, so it stays small."""

    def __init__(self) -> None:
        self._sizes: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def get(self, digest: str) -> tuple[int, int] | None:
        return self._sizes.get(digest)

    def add(self, digest: str, size: tuple[int, int]) -> None:
        with self._lock:
            self._sizes[digest] = size
            while len(self._sizes) > _KNOWN_CLEAN_ENTRIES:
                del self._sizes[next(iter(self._sizes))]


_known_clean = _KnownClean()


def validate_image(data: Any, *, max_pixels: int, source: str, base: Path | None = None) -> Image:
    """Decode `data` fully and return it in canonical form.

    `data` may be encoded bytes, a path (relative ones under `base`), a data URI, base64 text, a dict with `bytes`,
    `path`, `url` or `image`, or a Pillow image. Clean RGB PNG and JPEG bytes are kept as they are; anything else
    that can be shown as RGB (palette, greyscale, alpha on white, 16 bits, EXIF-rotated, other formats) becomes a PNG.
    Raises DataError that begins with `source`: missing, not an image, truncated, animated, a side under 2 pixels,
    more than `max_pixels` pixels (told from the header, before decoding), or longer than 200 times its other side.
    """
    try:
        payload = data if isinstance(data, Pillow.Image) else read_encoded(data, base=base)
        if isinstance(payload, bytes):
            digest = hashlib.sha256(payload).hexdigest()
            if known := _known_clean.get(digest):
                _check_size(known, max_pixels)
                return Image(data=payload, width=known[0], height=known[1])
            image = _canonical(_open(payload), payload, max_pixels)
            if image.data is payload:
                _known_clean.add(digest, (image.width, image.height))
            return image
        return _canonical(payload, None, max_pixels)
    except _Refused as refused:
        raise DataError(f"{source}: {refused}") from refused


def decode(image: Image) -> Pillow.Image:
    """Pixels of a validated image: a Pillow image in mode RGB."""
    decoded = Pillow.open(io.BytesIO(image.data))
    decoded.load()
    return decoded


def encode(pixels: Pillow.Image) -> Image:
    """An RGB Pillow image as a PNG without metadata. The same pixels give the same bytes."""
    bare = Pillow.frombytes("RGB", pixels.size, pixels.tobytes())
    buffer = io.BytesIO()
    bare.save(buffer, format="PNG", compress_level=1)
    return Image(data=buffer.getvalue(), width=bare.width, height=bare.height)


def shrunk(prompt: Prompt, longest_side_pixels: int) -> Prompt:
    """The same prompt with images that are at most so many pixels long."""

    def smaller(part: str | Image) -> str | Image:
        if isinstance(part, str) or max(part.width, part.height) <= longest_side_pixels:
            return part
        share = longest_side_pixels / max(part.width, part.height)
        size = [max(MIN_SIDE_PIXELS, round(side * share)) for side in (part.width, part.height)]
        return encode(decode(part).resize((size[0], size[1])))

    messages = (replace(message, content=tuple(map(smaller, message.content))) for message in prompt.messages)
    return replace(prompt, messages=tuple(messages))


def read_encoded(value: Any, *, base: Path | None = None) -> bytes:
    """The encoded bytes that `value` holds or points to; see validate_image. Raises ValueError with the reason."""
    if isinstance(value, bytes | bytearray | memoryview):
        return _not_empty(bytes(value))
    if isinstance(value, Path):
        return _read_file(value, base)
    if isinstance(value, str):
        return _from_text(value, base)
    if isinstance(value, Mapping):
        inner = value.get("bytes")
        if isinstance(inner, str):
            return _from_base64(inner)
        for key in ("bytes", "path", "url", "image", "image_url"):
            if value.get(key) is not None:
                return read_encoded(value[key], base=base)
        raise _Refused(f"no image: none of bytes, path, url or image is set (keys: {', '.join(map(str, value))})")
    if value is None:
        raise _Refused("missing (null)")
    raise _Refused(f"a value of type {type(value).__name__} is not an image")


class _Refused(ValueError):
    """Why an image is refused."""


def _not_empty(data: bytes) -> bytes:
    if not data:
        raise _Refused("empty (0 bytes)")
    return data


def _from_text(text: str, base: Path | None) -> bytes:
    if text.startswith("data:"):
        header, separator, body = text.partition(",")
        if not separator:
            raise _Refused("malformed data URI: no comma")
        return _from_base64(unquote(body)) if header.endswith(";base64") else _not_empty(unquote_to_bytes(body))
    if text.startswith(("http://", "https://", "s3://", "gs://")):
        raise _Refused(f"{text[:80]} is remote: download it and give the path")
    text = text.removeprefix("file://")
    # Base64 of PNG, JPEG, GIF, WebP, BMP and TIFF begins like this; a path of this length does not.
    if len(text) > 64 and text.startswith(("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk", "SUkq", "TU0A")):
        try:
            return _from_base64(text)
        except _Refused:
            pass
    if not text:
        raise _Refused("empty path")
    return _read_file(Path(text), base)


def _from_base64(text: str) -> bytes:
    try:
        return _not_empty(base64.b64decode("".join(text.split()), validate=True))
    except (binascii.Error, ValueError) as error:
        if isinstance(error, _Refused):
            raise
        raise _Refused(f"malformed base64: {error}") from error


def _read_file(path: Path, base: Path | None) -> bytes:
    path = (base or Path()) / path.expanduser()
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise _Refused(f"{path} is a folder")
        if size > MAX_ENCODED_BYTES:
            raise _Refused(f"{path} has {size:,} bytes, more than {MAX_ENCODED_BYTES:,}")
        return _not_empty(path.read_bytes())
    except FileNotFoundError as error:
        raise _Refused(f"there is no file {path}") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        if isinstance(error, _Refused):
            raise
        raise _Refused(f"cannot read {str(path)[:200]}: {error}") from error


def _open(payload: bytes) -> Pillow.Image:
    if len(payload) > MAX_ENCODED_BYTES:
        raise _Refused(f"{len(payload):,} bytes, more than {MAX_ENCODED_BYTES:,}")
    try:
        return Pillow.open(io.BytesIO(payload))
    except (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:
        raise _Refused(f"too large: {error}") from error
    except Pillow.UnidentifiedImageError as error:
        start = payload[:12].hex(" ")
        raise _Refused(f"not an image ({len(payload):,} bytes that begin with {start})") from error
    except Exception as error:  # decoders raise whatever they like on broken headers
        raise _Refused(f"not a readable image: {error}") from error


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if min(size) < MIN_SIDE_PIXELS:
        raise _Refused(f"{width}x{height} pixels: each side needs at least {MIN_SIDE_PIXELS}")
    if width * height > max_pixels:
        raise _Refused(
            f"{width}x{height} = {width * height:,} pixels, more than {max_pixels:,} (data.max_image_pixels)"
        )
    if max(size) > MAX_ASPECT_RATIO * min(size):
        raise _Refused(f"{width}x{height} pixels: one side is more than {MAX_ASPECT_RATIO} times the other")


def _canonical(opened: Pillow.Image, payload: bytes | None, max_pixels: int) -> Image:
    _check_size(opened.size, max_pixels)
    deep = any(";16" in str(tile) for tile in getattr(opened, "tile", ()))  # 16-bit RGB opens as mode RGB
    try:
        frames = getattr(opened, "n_frames", 1)
        if frames > 1 and opened.format != "MPO":  # MPO: a photo followed by its preview, as phones write it
            raise _Refused(f"animated: {frames} frames")
        opened.load()
        orientation = opened.getexif().get(_ORIENTATION_TAG, 1)
        is_clean = opened.mode == "RGB" and orientation == 1 and not deep and "transparency" not in opened.info
        if payload is not None and is_clean and opened.format in ("PNG", "JPEG"):
            return Image(data=payload, width=opened.width, height=opened.height)
        return encode(_to_rgb(ImageOps.exif_transpose(opened)))
    except _Refused:
        raise
    except Exception as error:  # decoders raise whatever they like on broken data
        raise _Refused(f"truncated or damaged: {error}") from error


def _to_rgb(image: Pillow.Image) -> Pillow.Image:
    if image.mode == "F":
        raise _Refused("floating-point pixels: their range is not known")
    if image.mode.startswith("I"):
        return _from_integers(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Pillow.new("RGBA", layer.size, (255, 255, 255, 255))
        return Pillow.alpha_composite(white, layer).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_integers(image: Pillow.Image) -> Pillow.Image:
    """Greyscale of 16 bits; Pillow's own conversion clips at 255 instead of scaling."""
    import numpy as np

    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 0xFFFF:
        raise _Refused(f"integer pixels from {values.min()} to {values.max()}: not 16 bits")
    return Pillow.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
