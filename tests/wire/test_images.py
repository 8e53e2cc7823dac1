"""Untrusted images."""

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tinsmith.config import ImagesConfig
from tinsmith.errors import UserError
from tinsmith.wire.images import ImageHeader, decode, read_header

LIMITS = ImagesConfig()


def saved(image: Image.Image, format: str = "png", **options: Any) -> bytes:
    out = BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def encoded(format: str, size: tuple[int, int] = (6, 4)) -> bytes:
    return saved(Image.new("RGB", size), format)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_that_claims(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(b""))


def palette() -> Image.Image:
    """Of two colours, one beside the other."""
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    return image


@pytest.mark.parametrize(
    ("data", "pixels"),
    [
        (saved(Image.new("L", (1, 1), 7)), [[7, 7, 7]]),
        (saved(Image.new("1", (1, 1), 1)), [[255, 255, 255]]),
        (saved(Image.new("RGBA", (1, 1), (1, 2, 3, 0))), [[1, 2, 3]]),
        (saved(Image.new("LA", (2, 1), (200, 0))), [[200, 200, 200]] * 2),
        (saved(palette()), [[10, 20, 30], [40, 50, 60]]),
        (saved(palette(), transparency=0), [[10, 20, 30], [40, 50, 60]]),
    ],
)
def test_every_mode_becomes_rgb_and_the_colours_below_transparency_stay(data: bytes, pixels: list[list[int]]) -> None:
    assert np.asarray(decode(data, "png", LIMITS))[0].tolist() == pixels


def png_of_16_bits(colour_type: int, *values: int) -> bytes:
    """A PNG of one row; colour types: 0 grey, 2 RGB, 4 grey and alpha, 6 RGBA."""
    channels = {0: 1, 2: 3, 4: 2, 6: 4}[colour_type]

    header = struct.pack(">IIBBBBB", len(values) // channels, 1, 16, colour_type, 0, 0, 0)
    row = b"\0" + np.array(values, dtype=">u2").tobytes()
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(row))
        + png_chunk(b"IEND", b"")
    )


def test_grey_of_16_bits_is_scaled_exactly() -> None:
    values = np.arange(2**16, dtype=np.uint32).reshape(256, 256)
    pixels = np.asarray(decode(saved(Image.fromarray(values.astype(np.uint16))), "png", LIMITS))
    expected = np.rint(values / 257).astype(np.uint8)
    np.testing.assert_array_equal(pixels, np.stack([expected] * 3, axis=-1))
    few = decode(png_of_16_bits(0, 0, 128, 129, 257, 32896, 65535), "png", LIMITS)
    assert np.asarray(few)[0, :, 0].tolist() == [0, 0, 1, 1, 128, 255]


@pytest.mark.parametrize(
    ("colour_type", "values", "pixels"),
    [
        (2, [0, 255, 256, 65535, 32896, 128], [[0, 0, 1], [255, 128, 0]]),
        (4, [32896, 0, 65535, 65535], [[128, 128, 128], [255, 255, 255]]),
        (6, [255, 256, 65535, 0], [[0, 1, 255]]),
    ],
    ids=["RGB", "grey with alpha", "RGBA"],
)
def test_of_other_16_bit_images_the_upper_8_bits_are_kept(
    colour_type: int, values: list[int], pixels: list[list[int]]
) -> None:
    assert np.asarray(decode(png_of_16_bits(colour_type, *values), "png", LIMITS))[0].tolist() == pixels


def test_a_cmyk_jpeg_has_the_colours_that_it_shows() -> None:
    data = saved(Image.new("CMYK", (8, 8), (0, 128, 255, 20)), "jpeg", quality=100)
    pixel = np.asarray(decode(data, "jpeg", LIMITS), dtype=int)[0, 0]
    assert np.abs(pixel - [235, 117, 0]).max() <= 2  # JPEG rounds


@pytest.mark.parametrize(
    ("data", "format", "says"),
    [
        (encoded("jpeg"), "png", "labelled 'png' but is 'jpeg'"),
        (encoded("gif"), "png", "not a PNG or JPEG"),
        (encoded("gif"), "gif", "format 'gif' is not supported"),
        (b"", "png", "not a PNG or JPEG"),
        *(
            (png_that_claims(side, side), "png", "max_image_pixels allows 50000000")
            for side in (8_000, 20_000, 2**31 - 1)
        ),
        (encoded("png", (201, 1)), "png", "max_aspect"),
    ],
)
def test_a_wrong_label_and_a_bomb_are_refused_by_the_header(data: bytes, format: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_header(data, format, LIMITS)


@pytest.mark.parametrize("format", ["png", "jpeg"])
def test_bytes_and_aspect_are_limited_and_broken_images_refused(format: str) -> None:
    assert read_header(encoded(format, (1, 200)), format, LIMITS) == ImageHeader(1, 200)
    assert (decode(encoded(format), format, LIMITS).mode, decode(encoded(format), format, LIMITS).size) == (
        "RGB",
        (6, 4),
    )
    with pytest.raises(UserError, match="max_image_mib"):
        read_header(encoded(format), format, ImagesConfig(max_image_mib=0.00001))
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    with pytest.raises(UserError, match="broken"):
        decode(saved(Image.fromarray(noise), format)[:-200], format, LIMITS)
    if format == "png":
        wrong_checksum = bytearray(encoded("png"))
        wrong_checksum[-20] ^= 0xFF
        with pytest.raises(UserError):
            decode(bytes(wrong_checksum), "png", LIMITS)


@pytest.mark.parametrize("behind", [33, -12], ids=["before the pixels", "behind the pixels"])
def test_a_png_of_many_small_chunks_is_refused(behind: int) -> None:
    """Pillow reads one after the other, 7 microseconds each: 20 MiB of them took 12 seconds."""
    data = encoded("png")
    small = png_chunk(b"abCd", b"")
    assert decode(data[:behind] + small * 40 + data[behind:], "png", LIMITS).size == (6, 4)
    with pytest.raises(UserError, match="bytes takes more than 725 reads: its chunks or markers are too small"):
        decode(data[:behind] + small * 10_000 + data[behind:], "png", LIMITS)


def test_a_large_png_in_chunks_of_a_kilobyte_is_decoded() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (600, 600, 3), dtype=np.uint8)
    data = saved(Image.fromarray(noise))
    header, pixels, end = data[:33], zlib.compress(b"".join(b"\0" + row.tobytes() for row in noise)), data[-12:]
    pieces = [png_chunk(b"IDAT", pixels[start : start + 1024]) for start in range(0, len(pixels), 1024)]
    assert len(pieces) > 1000
    assert np.array_equal(np.asarray(decode(header + b"".join(pieces) + end, "png", LIMITS)), noise)


@pytest.mark.parametrize("small", [b"\xff", b"\xff\xfe\x00\x02"], ids=["fill bytes", "empty comments"])
def test_a_jpeg_of_many_small_markers_is_refused_by_its_header(small: bytes) -> None:
    data = encoded("jpeg")
    assert read_header(data[:2] + small * 40 + data[2:], "jpeg", LIMITS) == ImageHeader(6, 4)
    with pytest.raises(UserError, match="reads: its chunks or markers are too small"):
        read_header(data[:2] + small * 10_000 + data[2:], "jpeg", LIMITS)


def test_a_jpeg_of_many_scans_is_refused_by_its_header() -> None:
    """A scan of 31 bytes goes over 50 Mpx in 60 milliseconds: 100 KB kept the decoder busy for minutes."""
    data = saved(Image.new("RGB", (640, 480)), "jpeg", progressive=True)
    last = data[data.rfind(b"\xff\xda") : -2]
    assert decode(data[:-2] + last * 20 + data[-2:], "jpeg", LIMITS).size == (640, 480)
    with pytest.raises(UserError, match="the jpeg image has 1010 scans; at most 64 are taken"):
        read_header(data[:-2] + last * 1000 + data[-2:], "jpeg", LIMITS)
    limits = ImagesConfig(max_image_pixels=640 * 480)  # the largest images may have some, all others more
    assert read_header(data[:-2] + last * 10 + data[-2:], "jpeg", limits) == ImageHeader(640, 480)
    with pytest.raises(
        UserError,
        match="the jpeg image has 21 scans over 640 x 480 pixels; at most 20 scans over max_image_pixels=307200",
    ):
        read_header(data[:-2] + last * 11 + data[-2:], "jpeg", limits)
