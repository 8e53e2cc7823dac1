"""Untrusted image bytes. Headers are checked before anything is decoded, and only the client's format is decoded."""

from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from tinsmith.config import ImagesConfig
from tinsmith.errors import UserError, translated

# Pillow has a process-wide limit of its own, looked at when a header is read. Ours is checked below, before decoding.
Image.MAX_IMAGE_PIXELS = None

_PILLOW_FORMATS = {"png": ("PNG",), "jpeg": ("JPEG", "MPO")}
"""Pillow's names. MPO is a JPEG followed by more images, as phones make them."""

_READS, _BYTES_PER_READ = 256, 256
"""Most reads of an image by Pillow: `_READS`, and one for every `_BYTES_PER_READ` bytes.

A chunk of a PNG takes four, a marker of a JPEG one; 20 MB of the smallest ones took 15 seconds. Encoders write chunks
of 8 KiB or more.
"""

_MAX_SCANS = 64
"""Most scans of a JPEG: one of 31 bytes can cover all pixels. Progressive ones have some 10; phones add images."""

_SCANS_OF_LARGEST = 20
"""Most scans of a JPEG of `max_image_pixels`; smaller ones may have more. One in CMYK has 18."""

_SCAN = b"\xff\xda"
"""The marker of a scan. It cannot occur inside compressed pixels."""

_BROKEN = (OSError, SyntaxError, ValueError, EOFError)
"""Pillow's exceptions for damaged files."""


@dataclass(frozen=True)
class ImageHeader:
    """The size of an image in pixels."""

    width: int
    height: int


class _CountedBytes(BytesIO):
    """An encoded image with a limited number of reads."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.allowed = _READS + len(data) // _BYTES_PER_READ
        self.left = self.allowed

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise UserError(
                f"the image of {self.getbuffer().nbytes} bytes takes more than {self.allowed} reads: "
                "its chunks or markers are too small; "
                "encode it anew"
            )
        return super().read(size)


def read_header(data: bytes, format: str, limits: ImagesConfig) -> ImageHeader:
    """Check an encoded image by its header. `format` is what the client says.

    Raises UserError: not that format, too many bytes, pixels, pieces or scans, or too narrow.
    """
    image = _open(data, format, limits)
    return ImageHeader(image.width, image.height)


def decode(data: bytes, format: str, limits: ImagesConfig) -> Image.Image:
    """The image in RGB, 8 bits a channel. Raises UserError as `read_header`, and for broken data.

    16-bit grey becomes round(value / 257). Of 16-bit colours, and 16-bit grey with alpha, Pillow keeps the upper 8
    bits. Alpha and a palette's transparency are dropped; CMYK is converted without a colour profile; EXIF orientation
    is ignored.
    """
    image = _open(data, format, limits)
    broken = f"the {format} image of {image.width} x {image.height} pixels is broken"
    with translated(_BROKEN, UserError, lambda error: f"{broken}: {error}"):
        if image.mode.startswith("I"):  # Pillow's own conversion would clip each value to 255: white
            grey = (np.asarray(image, dtype=np.uint32) + 128) // 257
            return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
        return image.convert("RGB")


def _open(data: bytes, format: str, limits: ImagesConfig) -> Image.Image:
    if format not in _PILLOW_FORMATS:
        raise UserError(f"image format {format!r} is not supported; send png or jpeg")
    if len(data) > limits.max_image_mib * 2**20:
        raise UserError(f"the image has {len(data)} bytes; max_image_mib allows {limits.max_image_mib} MiB")
    scans = data.count(_SCAN) if format == "jpeg" else 0
    if scans > _MAX_SCANS:
        raise UserError(f"the jpeg image has {scans} scans; at most {_MAX_SCANS} are taken: encode it anew")

    def why_not(error: Exception) -> str:
        if isinstance(error, UnidentifiedImageError):
            return f"the {len(data)} bytes labelled {format!r} are not a PNG or JPEG image"
        return f"the header of the {format} image is broken: {error}"

    with translated(_BROKEN, UserError, why_not):
        image = Image.open(_CountedBytes(data), formats=("PNG", "JPEG"))
    if image.format not in _PILLOW_FORMATS[format]:
        raise UserError(f"the image is labelled {format!r} but is {str(image.format).lower()!r}")
    _check_size(image.width, image.height, limits)
    if scans * image.width * image.height > _SCANS_OF_LARGEST * limits.max_image_pixels:
        raise UserError(
            f"the jpeg image has {scans} scans over {image.width} x {image.height} pixels; "
            f"at most {_SCANS_OF_LARGEST} scans over "
            f"max_image_pixels={limits.max_image_pixels} are taken: encode it anew, or scale it down"
        )
    return image


def check_pixels(total: int, limits: ImagesConfig) -> None:
    """Raise UserError if the images of a prompt or datum exceed `max_input_pixels` together."""
    if total > limits.max_input_pixels:
        raise UserError(
            f"the images have {total} pixels together; max_input_pixels allows {limits.max_input_pixels}: "
            "scale them down, or send fewer"
        )


def _check_size(width: int, height: int, limits: ImagesConfig) -> None:
    if width < 1 or height < 1:
        raise UserError(f"the image has {width} x {height} pixels; both sides must be at least 1")
    if width * height > limits.max_image_pixels:
        raise UserError(
            f"the image has {width} x {height} pixels; max_image_pixels allows {limits.max_image_pixels}: scale it down"
        )
    if max(width, height) > limits.max_aspect * min(width, height):
        raise UserError(
            f"the image of {width} x {height} pixels is too long and narrow; "
            f"max_aspect={limits.max_aspect} is the limit"
        )
