import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

from argusrl.data.images import decode, shrunk, validate_image
from argusrl.errors import DataError
from argusrl.types import Image, Message, Prompt

MAX = 1_000_000


def pixels(width: int = 12, height: int = 8, seed: int = 0) -> Pillow.Image:
    return Pillow.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Pillow.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def validate(data, **options) -> Image:
    return validate_image(data, max_pixels=MAX, source="image 1", **options)


def reason(data, **options) -> str:
    with pytest.raises(DataError) as caught:
        validate_image(data, **{"max_pixels": MAX, "source": "image 1", **options})
    assert caught.value.message.startswith("image 1: ")
    return caught.value.message


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_clean_bytes_are_kept_so_that_their_address_is_stable(kind):
    data = encoded(pixels(), kind)
    first, second = validate(data), validate(data)  # the second comes from the memory of clean images
    assert first.data == second.data == data
    assert (second.width, second.height) == (12, 8)


def test_the_pixel_limit_holds_for_an_image_seen_before():
    data = encoded(pixels(40, 40))
    validate(data)
    assert "1,600 pixels, more than 1,000" in reason(data, max_pixels=1000)


def test_forms_of_the_same_image_give_the_same_content(tmp_path: Path):
    data = encoded(pixels())
    (tmp_path / "a b.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    forms = [
        data,
        bytearray(data),
        tmp_path / "a b.png",
        str(tmp_path / "a b.png"),
        "a b.png",
        f"data:image/png;base64,{text}",
        text,
        {"bytes": data, "path": "elsewhere.png"},
        {"bytes": None, "path": "a b.png"},
        {"bytes": text},
        {"url": f"data:image/png;base64,{text}"},
        {"image": data},
    ]
    assert {validate(form, base=tmp_path).sha256 for form in forms} == {validate(data).sha256}


def test_pixels_become_a_png_with_the_same_pixels_every_time():
    first, second = validate(pixels()), validate(pixels())
    assert first.data == second.data
    assert decode(first).tobytes() == pixels().tobytes()


def test_alpha_goes_on_white():
    rgba = Pillow.new("RGBA", (4, 4), (255, 0, 0, 0))
    rgba.putpixel((0, 0), (255, 0, 0, 255))
    shown = decode(validate(encoded(rgba)))
    assert shown.mode == "RGB"
    assert shown.getpixel((0, 0)) == (255, 0, 0)
    assert shown.getpixel((3, 3)) == (255, 255, 255)


def test_a_transparent_colour_of_an_rgb_png_goes_on_white():
    shown = decode(validate(encoded(Pillow.new("RGB", (4, 4), (1, 2, 3)), transparency=(1, 2, 3))))
    assert shown.getpixel((0, 0)) == (255, 255, 255)


def test_palette_with_and_without_transparency():
    palette = Pillow.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 200, 30] + [0] * 750)
    assert decode(validate(encoded(palette))).getpixel((1, 1)) == (10, 200, 30)
    assert decode(validate(encoded(palette, transparency=1))).getpixel((1, 1)) == (255, 255, 255)


def test_16_bit_greyscale_is_scaled_not_clipped():
    deep = Pillow.fromarray(np.array([[0, 0x8000], [0xFFFF, 0x0100]], dtype=np.uint16))
    shown = np.asarray(decode(validate(encoded(deep))))
    assert shown[..., 0].tolist() == [[0, 128], [255, 1]]


def png_16_bit_rgb() -> bytes:
    import struct
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = (b"\x00" + struct.pack(">HHH", 0xFFFF, 0x8000, 0x0100) * 2) * 2
    header = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_16_bit_colour_becomes_8_bit():
    data = png_16_bit_rgb()
    image = validate(data)
    assert image.data != data
    assert decode(image).getpixel((0, 0)) == (255, 128, 1)


@pytest.mark.parametrize("mode", ["L", "1", "CMYK", "LA", "YCbCr"])
def test_other_modes_become_rgb(mode):
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    assert decode(validate(encoded(pixels().convert(mode), kind))).mode == "RGB"


@pytest.mark.parametrize("kind", ["WEBP", "BMP", "GIF", "TIFF"])
def test_other_formats_become_png(kind):
    assert validate(encoded(pixels(), kind)).data.startswith(b"\x89PNG")


def test_exif_rotation_is_applied_and_gone():
    exif = Pillow.Exif()
    exif[0x0112] = 6  # turn by a quarter to show it upright
    image = validate(encoded(pixels(12, 8), "JPEG", exif=exif))
    assert (image.width, image.height) == (8, 12)
    shown = decode(image)
    assert shown.size == (8, 12)
    assert shown.getexif().get(0x0112) is None


def test_exif_without_rotation_keeps_the_bytes():
    exif = Pillow.Exif()
    exif[0x010E] = "a description"
    data = encoded(pixels(), "JPEG", exif=exif)
    assert validate(data).data == data


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_truncated(kind, share):
    data = encoded(pixels(200, 200), kind)
    assert "truncated" in reason(data[: int(len(data) * share)])


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animated(kind):
    data = encoded(pixels(seed=1), kind, save_all=True, append_images=[pixels(seed=2), pixels(seed=3)])
    assert "animated: 3 frames" in reason(data)


def test_a_phone_photo_with_its_preview_is_not_animated():
    data = encoded(pixels(), "MPO", save_all=True, append_images=[pixels(6, 4)])
    assert (validate(data).width, validate(data).height) == (12, 8)


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1)])
def test_too_small(size):
    assert "at least 2" in reason(encoded(pixels(*size)))


def test_too_many_pixels_is_told_from_the_header():
    header_only = encoded(Pillow.new("RGB", (5000, 5000)))[:60]  # decoding would fail as truncated
    assert "25,000,000 pixels, more than 1,000,000" in reason(header_only)


def test_a_decompression_bomb_beyond_the_decoders_own_limit():
    bomb = bytearray(encoded(pixels()))
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2
    import struct
    import zlib

    bomb[29:33] = struct.pack(">I", zlib.crc32(bytes(bomb[12:29])))
    assert "too large" in reason(bytes(bomb), max_pixels=50_000_000)


def test_too_long():
    assert "200 times" in reason(encoded(pixels(603, 3)))
    assert validate(encoded(pixels(600, 3))).width == 600


def test_missing_and_not_an_image(tmp_path: Path):
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.png").write_bytes(b"hello, this is text")
    assert "there is no file" in reason("nowhere.png", base=tmp_path)
    assert "empty (0 bytes)" in reason("empty.png", base=tmp_path)
    assert "not an image" in reason("text.png", base=tmp_path)
    assert "folder" in reason(tmp_path)
    assert "null" in reason(None)
    assert "0 bytes" in reason(b"")
    assert "none of bytes" in reason({"bytes": None, "path": None})
    assert "type int" in reason(7)
    assert "remote" in reason("https://example.org/a.png")
    assert "base64" in reason("data:image/png;base64,@@@")
    assert "no comma" in reason("data:image/png;base64")
    assert "cannot read" in reason("a\0b.png")
    assert "cannot read" in reason("x" * 5000)


def test_floating_point_pixels_are_refused():
    assert "floating-point" in reason(encoded(Pillow.new("F", (4, 4)), "TIFF"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_whatever_the_damage_it_is_an_rgb_image_or_a_refusal(kind):
    rng = np.random.RandomState(0)
    whole = encoded(pixels(30, 20), kind)
    for _ in range(150):
        data = bytearray(whole)
        for place in rng.randint(0, len(data), 4):
            data[place] = rng.randint(256)
        try:
            image = validate(bytes(data[: rng.randint(len(data) // 2, len(data) + 1)]))
        except DataError:
            continue
        shown = decode(image)
        assert (shown.mode, shown.size) == ("RGB", (image.width, image.height))


def test_a_shrunk_prompt_keeps_shapes_and_order_and_small_images():
    large, small = validate(encoded(pixels(400, 100))), validate(encoded(pixels(100, 80)))
    message = Message(role="user", content=("first", large, "then", small))
    prompt = shrunk(Prompt(id="a", messages=(message,), answer=3), 112)
    first, then = prompt.messages[0].images
    assert [part for part in prompt.messages[0].content if isinstance(part, str)] == ["first", "then"]
    assert (first.width, first.height) == decode(first).size == (112, 28)
    assert then is small
    assert (prompt.id, prompt.answer) == ("a", 3)


def test_an_extremely_long_image_keeps_sides_that_processors_take():
    thin = validate(encoded(pixels(390, 2)))
    (image,) = shrunk(Prompt(id="a", messages=(Message(role="user", content=(thin,)),)), 112).messages[0].images
    assert (image.width, image.height) == (112, 2)
