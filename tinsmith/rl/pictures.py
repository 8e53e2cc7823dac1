"""Pictures of messages: as encoded bytes, as a number of tokens, and on request as the pixel values that a model takes.

A picture is encoded once, when it enters the conversation; the same bytes go to the sampler and to the trainer.
"""

import base64
import binascii
import io
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Any, Literal

import numpy as np
import tinker
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from transformers import AutoConfig, AutoImageProcessor

from tinsmith.errors import UserError

Format = Literal["png", "jpeg"]


@dataclass(frozen=True)
class Picture:
    """An image file with the number of positions it takes in a sequence."""

    data: bytes
    format: Format
    tokens: int

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal."""
        return sha256(self.data).hexdigest()

    @cached_property
    def chunk(self) -> tinker.types.ImageChunk:
        """The picture as the SDK takes it; made once for all prompts that it is in."""
        return tinker.types.ImageChunk(data=self.data, format=self.format, expected_tokens=self.tokens)


def encode(source: Image.Image | bytes | str) -> tuple[bytes, Format, tuple[int, int]]:
    """File, format and size (width, height). PNG and JPEG files stay as they are, everything else becomes a PNG.

    Raises UserError for what is no picture.
    """
    if isinstance(source, Image.Image):
        plain = _plain(source)
        return _pixels_as_png(plain.mode, plain.size, plain.tobytes()), "png", plain.size
    data = _from_data_uri(source) if isinstance(source, str) else source
    try:
        image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        raise UserError(f"a picture of {len(data)} bytes that begins with {data[:8]!r} is no image file that Pillow can read") from error
    if image.format == "PNG":
        return data, "png", image.size
    if image.format == "JPEG":
        return data, "jpeg", image.size
    return encode(image.copy())  # as pixels


def _plain(image: Image.Image) -> Image.Image:
    """The picture in a mode whose bytes are all there is to it (a palette is not)."""
    return image if image.mode in ("RGB", "RGBA", "L") else image.convert("RGB")


@lru_cache(maxsize=1024)
def _pixels_as_png(mode: str, size: tuple[int, int], pixels: bytes) -> bytes:
    # Remembered, because the episodes of a group begin with one picture, and simple environments show the same ones again and again.
    file = io.BytesIO()
    # Level 1: environments draw flat colours, and a smaller file is not worth more of the client's time.
    Image.frombytes(mode, size, pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _from_data_uri(uri: str) -> bytes:
    header, comma, body = uri.partition(",")
    if not comma or not header.startswith("data:") or not header.endswith(";base64"):
        raise UserError(f"a picture given as a text must be a data URI (data:image/png;base64,...), not {uri[:60]!r}")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise UserError(f"the data URI {uri[:60]!r}... holds no base64: {error}") from error


class PictureProcessor:
    """What a vision-language model makes of pictures, from its files in `source` (a directory or a Hub id)."""

    def __init__(self, source: str) -> None:
        self.placeholder_id = int(AutoConfig.from_pretrained(source).image_token_id)
        self._processor: Any = AutoImageProcessor.from_pretrained(source, backend="pil")
        self._counts: dict[tuple[int, int], int] = {}

    def picture(self, source: Image.Image | bytes | str) -> Picture:
        """A picture with its count. Raises UserError as `encode` does."""
        data, file_format, size = encode(source)
        if size not in self._counts:
            width, height = size
            patches = self._processor.get_number_of_image_patches(height, width, {})
            self._counts[size] = int(patches) // self._processor.merge_size**2
        return Picture(data, file_format, self._counts[size])

    def pixels(self, pictures: tuple[Picture, ...]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """`pixel_values` [patches, patch_dim] and `image_grid_thw` [pictures, 3] of at least one picture."""
        images = [Image.open(io.BytesIO(picture.data)) for picture in pictures]
        made = self._processor(images=images, return_tensors="np")
        return made["pixel_values"], made["image_grid_thw"]


def takes_pictures(source: str) -> bool:
    """Whether the model in `source` has a placeholder for pictures."""
    return hasattr(AutoConfig.from_pretrained(source), "image_token_id")
