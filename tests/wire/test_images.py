"""Untrusted images."""

import struct
import zlib
from io import BytesIO

import pytest
from PIL import Image

from tinsmith.config import ImagesConfig
from tinsmith.errors import UserError
from tinsmith.wire.images import ImageHeader, decode, read_header

LIMITS = ImagesConfig()

Color = int | tuple[int, ...]


def encoded(format: str, size: tuple[int, int] = (6, 4), mode: str = "RGB", color: Color = 0) -> bytes:
    out = BytesIO()
    Image.new(mode, size, color).save(out, format)
    return out.getvalue()


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_that_claims(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b""))


@pytest.mark.parametrize("format", ["png", "jpeg"])
def test_header_and_pixels(format: str) -> None:
    data = encoded(format)
    assert read_header(data, format, LIMITS) == ImageHeader(6, 4)
    image = decode(data, format, LIMITS)
    assert (image.mode, image.size) == ("RGB", (6, 4))


@pytest.mark.parametrize(("mode", "color", "pixel"), [("L", 7, (7, 7, 7)), ("RGBA", (1, 2, 3, 0), (1, 2, 3)), ("1", 1, (255, 255, 255))])
def test_every_mode_becomes_rgb(mode: str, color: Color, pixel: tuple[int, int, int]) -> None:
    assert decode(encoded("png", mode=mode, color=color), "png", LIMITS).getpixel((0, 0)) == pixel


def test_a_palette_becomes_rgb() -> None:
    out = BytesIO()
    Image.new("RGB", (2, 2), (9, 8, 7)).quantize(4).save(out, "png")
    assert decode(out.getvalue(), "png", LIMITS).getpixel((1, 1)) == (9, 8, 7)


def test_the_label_must_be_true() -> None:
    with pytest.raises(UserError, match="labelled 'png' but is 'jpeg'"):
        read_header(encoded("jpeg"), "png", LIMITS)
    with pytest.raises(UserError, match="not a PNG or JPEG"):
        read_header(encoded("gif"), "png", LIMITS)
    with pytest.raises(UserError, match="format 'gif' is not supported"):
        read_header(encoded("gif"), "gif", LIMITS)
    with pytest.raises(UserError, match="not a PNG or JPEG"):
        read_header(b"", "png", LIMITS)


def test_a_bomb_is_refused_by_its_header() -> None:
    for side in (8_000, 20_000, 2**31 - 1):
        with pytest.raises(UserError, match="max_image_pixels allows 50000000"):
            read_header(png_that_claims(side, side), "png", LIMITS)


def test_bytes_and_aspect_are_limited() -> None:
    with pytest.raises(UserError, match="max_image_mib"):
        read_header(encoded("png"), "png", ImagesConfig(max_image_mib=0.00001))
    with pytest.raises(UserError, match="max_aspect"):
        read_header(encoded("png", (201, 1)), "png", LIMITS)
    assert read_header(encoded("png", (1, 200)), "png", LIMITS) == ImageHeader(1, 200)


@pytest.mark.parametrize("format", ["png", "jpeg"])
def test_truncated_images_are_refused(format: str) -> None:
    noise = BytesIO()
    Image.effect_noise((64, 64), 100).convert("RGB").save(noise, format)
    with pytest.raises(UserError, match="broken"):
        decode(noise.getvalue()[:-200], format, LIMITS)


def test_a_broken_checksum_is_refused() -> None:
    data = bytearray(encoded("png"))
    data[-20] ^= 0xFF
    with pytest.raises(UserError):
        decode(bytes(data), "png", LIMITS)
