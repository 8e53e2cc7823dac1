"""Turns an RGB image into a vision tower's patches, with the numbers of the model's own Hugging Face processor.

The processor computes in float32, on arrays that it copies a dozen times. It rescales and normalizes every colour value
alone, so what it makes of each is noted once, when the model is loaded. An image is then resized by Pillow, as the
processor does it, and cut into patches of bytes. On images of random pixels this is compared, bit for bit, with what
the processor returns.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from tinsmith.errors import ConfigError, UserError
from tinsmith.models.vision_tower import ImageInput, PixelLevels
from tinsmith.wire.images import ImageHeader

KNOWN = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")
"""Names of the image processor of the supported families, some with "Fast" at the end: all are one."""

CHANNELS = 3
"""Images come in RGB."""


class LocalProcessor:
    """A model's own image processor, for any thread."""

    def __init__(self, source: str) -> None:
        """Load the processor of a local directory or Hub id. Raises ConfigError if it computes in an unknown way."""
        try:
            settings, _ = Qwen2VLImageProcessorPil.get_image_processor_dict(source)
            named = str(settings.get("image_processor_type") or KNOWN[0])
        except OSError as error:
            raise ConfigError(f"{source}: its image processor cannot be read: {str(error).splitlines()[0]}") from error
        agrees, reason = named.startswith(KNOWN), ""
        if agrees:
            try:
                self.processor: Any = Qwen2VLImageProcessorPil.from_pretrained(source)
                self.patch_size: int = self.processor.patch_size
                self.merge_size: int = self.processor.merge_size
                self.levels = self._read_levels()
                agrees = self._agrees()
            # Values of another kind
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                agrees, reason = False, f" ({type(error).__name__}: {' '.join(str(error).split())})"
        if not agrees:
            raise ConfigError(
                f"{source}: its image processor, {named}, does not compute what Qwen2VLImageProcessor computes with "
                f"the settings of preprocessor_config.json{reason}; copy that of the model: Tinsmith knows no other"
            )

    def __call__(self, sha256: bytes, image: Image.Image) -> ImageInput:
        """Cut an image in RGB, whose bytes have this hash, into patches."""
        height, width = self._resized(image.height, image.width)
        if image.size != (width, height):
            image = image.resize((width, height), self.processor.resample)
        pixels = self._patches(np.asarray(image))
        grid = (1, height // self.patch_size, width // self.patch_size)
        tokens = math.prod(grid) // self.merge_size**2
        return ImageInput(sha256, torch.from_numpy(pixels), self.levels, grid, slice(0, tokens))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Pixels of a token's edge, and the fewest and most of an image after resizing."""
        size = self.processor.size
        return self.patch_size * self.merge_size, size["shortest_edge"], size["longest_edge"]

    def tokens(self, header: ImageHeader) -> int:
        """Number of image tokens for an image of that size.

        Raises UserError if the processor takes none of that shape.
        """
        try:
            patches: int = self.processor.get_number_of_image_patches(header.height, header.width, {})
        except ValueError as error:
            raise UserError(f"the image of {header.width} x {header.height} pixels cannot be used: {error}") from error
        return patches // self.merge_size**2

    def _patches(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Cut [height, width, channels] into [patches, channels * area], merged patches next to each other."""
        size, merge = self.patch_size, self.merge_size
        rows, columns = pixels.shape[0] // (size * merge), pixels.shape[1] // (size * merge)
        blocks = pixels.reshape(rows, merge, size, columns, merge, size, CHANNELS)
        return np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(
            rows * columns * merge**2, CHANNELS * size**2
        )

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image after resizing."""
        size: tuple[int, int] = smart_resize(height, width, *self.sizes)
        return size

    def _read_levels(self) -> PixelLevels:
        """Read off the processor's output for every value in every channel."""
        block = self.patch_size * self.merge_size
        side = math.ceil(math.sqrt(self.processor.size["shortest_edge"]) / block) * block
        counted = (np.arange(side**2) % 256).astype(np.uint8).reshape(side, side, 1).repeat(CHANNELS, axis=2)
        frames: int = self.processor.temporal_patch_size
        pixels = self._patches(counted).reshape(-1, CHANNELS, self.patch_size**2)  # [patches, channels, area]
        # [patches, channels, frames, area]
        values = self._processed(Image.fromarray(counted)).view(len(pixels), CHANNELS, frames, -1)
        table = torch.empty(CHANNELS, 256)
        for channel in range(CHANNELS):
            table[channel, torch.from_numpy(pixels[:, channel]).long()] = values[:, channel, 0]
        return PixelLevels(table, frames)

    def _processed(self, image: Image.Image) -> Tensor:
        """Run the processor itself: [patches, patch_dim] float32."""
        values: Tensor = self.processor(images=[image], return_tensors="pt")["pixel_values"]
        return values

    def _agrees(self) -> bool:
        """Whether we compute what the processor does, of an image that has to be resized."""
        block = self.patch_size * self.merge_size
        pixels = np.random.default_rng(0).integers(0, 256, (2 * block - 5, 3 * block + 7, CHANNELS), dtype=np.uint8)
        image = Image.fromarray(pixels)
        return torch.equal(self(b"", image).pixel_values, self._processed(image))
