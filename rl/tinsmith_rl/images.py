"""Images as environments give them, and the files that become of them.

Needs Pillow only, so that processes of environments start fast.

A file keeps the pixels that the server sees: of PNG and JPEG files as they are, and of anything else in a PNG.
"""

import base64
import binascii
import io
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from tinsmith_rl.errors import UserError, foreign_code, translated

Format = Literal["png", "jpeg"]

_FORMATS: dict[str | None, Format] = {"PNG": "png", "JPEG": "jpeg", "MPO": "jpeg"}
"""Files that are sent as they are. An MPO is a JPEG with further images behind it, as phones make them."""
_SEEN_AS = {"RGBa": "RGBA", "La": "LA"}
"""Modes that Pillow does not convert to RGB as it should, and others of the same pixels that it does."""
_KINDS = (
    "an image is a PIL image, an array of uint8 [height, width, 3 or 4] or [height, width], "
    "the bytes of an image file, or a data URI"
)


class ImageFile(NamedTuple):
    """An image file that was decoded without errors."""

    data: bytes
    format: Format
    size: tuple[int, int]
    """Width and height."""


def encode(source: Any) -> ImageFile:
    """The file of an image. PNG and JPEG files stay as they are; anything else becomes a PNG.

    Raises UserError if `source` is not an image, or one that is broken.
    """
    if isinstance(source, ImageFile):
        return source
    # Pillow raises exceptions of many types for broken files.
    with foreign_code(
        lambda error: UserError(f"the image cannot be decoded: {type(error).__name__}: {error}"), UserError
    ):
        if isinstance(source, Image.Image):
            return _of_pixels(source)
        if isinstance(source, bytes | bytearray | memoryview):
            return _of_file(bytes(source))
        if isinstance(source, str):
            return _of_file(_from_data_uri(source))
        if hasattr(source, "__array__"):
            return _of_pixels(_from_array(np.asarray(source)))
    raise UserError(f"{source!r:.60} of type {type(source).__name__} is no image; {_KINDS}")


@lru_cache(maxsize=64)
def _of_file(data: bytes) -> ImageFile:
    unknown = f"an image of {len(data)} bytes that begins with {data[:8]!r} is no image file that Pillow can read"
    with translated(UnidentifiedImageError, lambda _: UserError(unknown)):
        image = Image.open(io.BytesIO(data))
    image.load()  # a header alone does not say that the rest is there
    file_format = _FORMATS.get(image.format)
    return ImageFile(data, file_format, image.size) if file_format else _of_pixels(image)


def _of_pixels(image: Image.Image) -> ImageFile:
    if not image.width or not image.height:
        raise UserError(f"the image has {image.width} x {image.height} pixels; both must be at least 1")
    shown = _plain(image)
    return ImageFile(_png(shown.mode, shown.size, shown.tobytes()), "png", shown.size)


def _plain(image: Image.Image) -> Image.Image:
    """The image in mode RGB, RGBA or L, with the pixels that the server sees in its file."""
    if image.mode in ("RGB", "RGBA", "L"):
        return image
    if image.mode in ("I", "F"):
        raise UserError(
            f"the scale of an image of mode {image.mode} is not known; convert it to mode L, or I;16 for 16 bits"
        )
    if image.mode.startswith("I;16"):  # Pillow's own conversion would clip; the server scales 16-bit files so
        return Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    return image.convert(_SEEN_AS.get(image.mode, image.mode)).convert("RGB")


def _from_array(array: Any) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise UserError(f"an array of {array.dtype} {list(array.shape)} is no image; {_KINDS}")
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


@lru_cache(maxsize=256)
def _png(mode: str, size: tuple[int, int], pixels: bytes) -> bytes:
    # Cached: all episodes of a group begin with the same image, and simple environments repeat the same few.
    file = io.BytesIO()
    # Compression level 1: environments draw flat colours, so higher levels cost the client time and save little.
    Image.frombytes(mode, size, pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _from_data_uri(uri: str) -> bytes:
    header, comma, body = uri.partition(",")
    if not comma or not header.startswith("data:") or not header.endswith(";base64"):
        raise UserError(f"an image given as a text must be a data URI (data:image/png;base64,...), not {uri[:60]!r}")
    with translated(binascii.Error, lambda error: UserError(f"the data URI {uri[:60]!r}... holds no base64: {error}")):
        return base64.b64decode(body, validate=True)
