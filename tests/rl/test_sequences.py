"""Pictures as environments give them become files that keep their pixels."""

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tinsmith.errors import UserError
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.sequences import encode

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8)


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(data: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "CMYK"])
def test_images_become_png_with_their_pixels(mode: str) -> None:
    image = Image.fromarray(PIXELS).convert(mode)
    data, kind, size = encode(image)
    assert (data[:4], kind, size) == (b"\x89PNG", "png", (64, 40))
    assert np.array_equal(pixels(data), np.asarray(image.convert("RGB")))


def test_png_and_jpeg_files_stay_as_they_are() -> None:
    image = Image.fromarray(PIXELS)
    for kind in ("PNG", "JPEG"):
        data = file_of(image, kind)
        assert encode(data) == (data, kind.lower(), (64, 40))
        assert encode(f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}") == (data, kind.lower(), (64, 40))


def test_other_files_become_png() -> None:
    data, kind, size = encode(file_of(Image.fromarray(PIXELS), "BMP"))
    assert (kind, size) == ("png", (64, 40))
    assert np.array_equal(pixels(data), PIXELS)
    palette = Image.fromarray(PIXELS).convert("P")
    assert np.array_equal(pixels(encode(file_of(palette, "GIF"))[0]), np.asarray(palette.convert("RGB")))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"no picture", "a picture of 10 bytes that begins with b'no pictu' is no image file"),
        ("https://example.org/cat.png", "must be a data URI"),
        ("data:image/png;base64,???", "holds no base64"),
    ],
)
def test_what_is_no_picture_is_refused(source: bytes | str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        encode(source)


def test_counts_and_pixel_values_are_the_processor_s(plain: ChatTemplate) -> None:
    assert plain.processor is not None
    pictures = tuple(plain.processor.picture(Image.new("RGB", size)) for size in ((64, 32), (128, 96), (64, 32)))
    assert [picture.tokens for picture in pictures] == [2, 12, 2]
    pixel_values, image_grid_thw = plain.processor.pixels(pictures)
    assert image_grid_thw.tolist() == [[1, 2, 4], [1, 6, 8], [1, 2, 4]]
    assert pixel_values.shape == (8 + 48 + 8, 1536)
    assert pictures[0].digest == pictures[2].digest != pictures[1].digest
