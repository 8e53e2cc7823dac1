"""Untrusted image bytes: checked in their header before anything is decoded, decoded by Pillow only if they are what they claim to be."""

from dataclasses import dataclass
from io import BytesIO

from PIL import Image, UnidentifiedImageError

from tinsmith.config import ImagesConfig
from tinsmith.errors import UserError

# Pillow has a process-wide limit of its own, looked at when a header is read. Ours is checked below, before anything is decoded.
Image.MAX_IMAGE_PIXELS = None

_PILLOW_FORMATS = {"png": ("PNG",), "jpeg": ("JPEG", "MPO")}
"""Pillow's names for what a client calls png and jpeg. MPO is a JPEG with further pictures behind it, as phones make them."""

_BROKEN = (OSError, SyntaxError, ValueError, EOFError)
"""What Pillow raises for damaged files: truncated data, bad chunks and checksums, impossible values."""


@dataclass(frozen=True)
class ImageHeader:
    """The size of an image in pixels."""

    width: int
    height: int


def read_header(data: bytes, format: str, limits: ImagesConfig) -> ImageHeader:
    """Check an encoded image by its header alone. `format` is what the client says: "png" or "jpeg".

    Raises UserError: not that format, too many bytes or pixels, or too long and narrow.
    """
    image = _open(data, format, limits)
    return ImageHeader(image.width, image.height)


def decode(data: bytes, format: str, limits: ImagesConfig) -> Image.Image:
    """The checked image in RGB, its EXIF orientation ignored. Raises UserError as `read_header`, and for broken or truncated data."""
    image = _open(data, format, limits)
    try:
        return image.convert("RGB")
    except _BROKEN as error:
        raise UserError(f"the {format} image of {image.width} x {image.height} pixels is broken: {error}") from error


def _open(data: bytes, format: str, limits: ImagesConfig) -> Image.Image:
    if format not in _PILLOW_FORMATS:
        raise UserError(f"image format {format!r} is not supported; send png or jpeg")
    if len(data) > limits.max_image_mib * 2**20:
        raise UserError(f"the image has {len(data)} bytes; max_image_mib allows {limits.max_image_mib} MiB")
    try:
        image = Image.open(BytesIO(data), formats=("PNG", "JPEG"))
    except UnidentifiedImageError as error:
        raise UserError(f"the {len(data)} bytes labelled {format!r} are not a PNG or JPEG image") from error
    except _BROKEN as error:
        raise UserError(f"the header of the {format} image is broken: {error}") from error
    if image.format not in _PILLOW_FORMATS[format]:
        raise UserError(f"the image is labelled {format!r} but is {str(image.format).lower()!r}")
    _check_size(image.width, image.height, limits)
    return image


def _check_size(width: int, height: int, limits: ImagesConfig) -> None:
    if width < 1 or height < 1:
        raise UserError(f"the image has {width} x {height} pixels; both sides must be at least 1")
    if width * height > limits.max_image_pixels:
        raise UserError(f"the image has {width} x {height} pixels; max_image_pixels allows {limits.max_image_pixels}: scale it down")
    if max(width, height) > limits.max_aspect * min(width, height):
        raise UserError(f"the image of {width} x {height} pixels is too long and narrow; max_aspect={limits.max_aspect} is the limit")
