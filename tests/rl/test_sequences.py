"""Images as environments give them become files that keep their pixels.

Invariant: What an RL environment shows becomes the pixels that its file would give, or ends its own episode; its
control tokens are text. Also: `tests/rl/test_rollouts.py`.
"""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tinsmith.config import ImagesConfig
from tinsmith.wire.images import decode
from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.errors import UserError
from tinsmith_rl.images import encode

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


MODES = (
    "1",
    "L",
    "LA",
    "La",
    "P",
    "PA",
    "RGB",
    "RGBA",
    "RGBa",
    "RGBX",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I;16",
    "I;16B",
    "I;16L",
)
"""Pillow's, but for I and F, whose scale is unknown."""


def image_of(mode: str) -> Image.Image:
    image = Image.fromarray(PIXELS)
    if mode.startswith("I;16"):
        grey = (np.asarray(image.convert("L")).astype(np.uint16) * 257).astype(">u2" if mode == "I;16B" else "<u2")
        return Image.frombytes(mode, image.size, grey.tobytes())
    return image.convert({"RGBa": "RGBA", "La": "LA"}.get(mode, mode)).convert(mode)


@pytest.mark.parametrize("mode", MODES)
def test_images_become_png_with_the_pixels_that_the_server_sees(mode: str) -> None:
    image = image_of(mode)
    data, kind, size = encode(image)
    assert (kind, size) == ("png", (64, 40))
    seen = np.asarray(decode(data, kind, ImagesConfig()))
    if mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):  # those that Pillow writes into a PNG as they are
        assert np.array_equal(seen, np.asarray(decode(file_of(image, "PNG"), "png", ImagesConfig())))
    grey = mode in ("L", "LA", "La", "I;16", "I;16B", "I;16L")
    expected = np.asarray(Image.fromarray(PIXELS).convert("L" if grey else "RGB").convert("RGB")).astype(int)
    if mode not in ("1", "P", "PA", "LAB"):  # which have fewer colours, or others
        assert np.abs(seen - expected).max() <= (8 if mode in ("YCbCr", "HSV") else 0)


def test_a_file_s_pixels_stay_and_png_and_jpeg_files_stay_as_they_are() -> None:
    image, palette, clear = Image.fromarray(PIXELS), *(Image.fromarray(PIXELS).convert("P") for _ in range(2))
    clear.info["transparency"] = 0  # which leaves its colours
    assert np.array_equal(pixels(encode(clear).data), pixels(file_of(clear, "PNG")))
    for array in (PIXELS, PIXELS[:, :, 0], PIXELS[:, :, :1], np.dstack([PIXELS, PIXELS[:, :, 0]])):
        assert np.array_equal(pixels(encode(array).data)[:, :, 0], PIXELS[:, :, 0])
    for kind in ("PNG", "JPEG"):
        data = file_of(image, kind)
        assert encode(data) == (data, kind.lower(), (64, 40))
        assert encode(f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}") == (
            data,
            kind.lower(),
            (64, 40),
        )
    for kind, shown in (("BMP", image), ("GIF", palette)):
        data, made, size = encode(file_of(shown, kind))
        assert (made, size) == ("png", (64, 40))
        assert np.array_equal(pixels(data), np.asarray(shown.convert("RGB")))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"no image", "an image of 8 bytes that begins with b'no image' is no image file"),
        ("https://example.org/cat.png", "must be a data URI"),
        ("data:image/png;base64,???", "holds no base64"),
        (Path("cat.png"), "is no image; an image is a PIL image, an array"),
        (None, "None of type NoneType is no image"),
        (PIXELS.astype(np.float32), r"an array of float32 \[40, 64, 3\] is no image"),
        (Image.new("F", (4, 4)), "the scale of an image of mode F is not known"),
        (Image.new("RGB", (0, 4)), "has 0 x 4 pixels"),
        (file_of(Image.fromarray(PIXELS), "PNG")[:900], "the image cannot be decoded"),
        (Image.open(io.BytesIO(file_of(Image.fromarray(PIXELS), "PNG")[:900])), "the image cannot be decoded"),
    ],
)
def test_what_is_no_image_is_refused(source: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        encode(source)


def test_counts_of_tokens_are_the_processor_s(plain: ChatTemplate) -> None:
    assert plain.processor is not None
    images = tuple(plain.processor.image(Image.new("RGB", size)) for size in ((64, 32), (128, 96), (64, 32)))
    assert [image.tokens for image in images] == [2, 12, 2]
    assert images[0].digest == images[2].digest != images[1].digest
