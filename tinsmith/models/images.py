"""An image on its way into a model: colour values of its patches, what the vision tower takes, and what the tower makes of it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class PixelLevels:
    """Table of the values that a model's image processor computes from the 256 values of a colour channel, to the bit.

    So images are kept and copied to the device as bytes: an eighth of the float32 values, which repeat an image for each frame of a patch.
    """

    def __init__(self, table: Tensor, frames: int) -> None:
        """`table` [channels, 256] float32; a patch spans `frames` frames, in all of which a still image is the same."""
        self.table = table
        self.frames = frames
        self._on_device: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def values(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """The processor's values of `pixels` [patches, channels * area] uint8 -> [patches, channels * frames * area], on their device."""
        table, offsets = self._tables(pixels.device, dtype)
        places = pixels.view(len(pixels), len(self.table), -1) + offsets  # [patches, channels, area] int32
        values = table.index_select(0, places.flatten()).view(len(pixels), len(self.table), 1, -1)  # [patches, channels, 1, area]
        return values.expand(-1, -1, self.frames, -1).reshape(len(pixels), -1)

    def _tables(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The table in one row, and where each channel begins in it: [channels * 256] and [channels, 1]."""
        key = device, dtype
        if key not in self._on_device:
            starts = torch.arange(len(self.table), dtype=torch.int32).unsqueeze(1) * 256
            self._on_device[key] = self.table.flatten().to(device, dtype), starts.to(device)
        return self._on_device[key]


@dataclass(frozen=True, eq=False)
class ImageInput:
    """One image, resized and cut into patches."""

    sha256: bytes
    pixels: Tensor
    """[patches, channels * area] uint8, on the CPU. The patches that are merged into one image token lie next to each other."""
    levels: PixelLevels
    grid_thw: tuple[int, int, int]
    """Frames, rows and columns of patches."""
    rows: slice
    """Its image tokens that lie in the sequence, which may be a part of one."""

    @property
    def pixel_values(self) -> Tensor:
        """Compute what the model's own processor returns: [patches, patch_dim] float32, on the CPU."""
        return self.levels.values(self.pixels, torch.float32)

    @property
    def pixel_values_nbytes(self) -> int:
        """Memory that `pixel_values` takes, in bytes."""
        return self.pixels.numel() * self.levels.frames * torch.float32.itemsize

    def image_tokens(self, merge_size: int) -> int:
        """Tokens of the whole image, where `merge_size` patches along each side become one."""
        return math.prod(self.grid_thw) // merge_size**2


@dataclass(frozen=True, eq=False)
class ImageFeatures:
    """Features of one image, computed by the frozen vision tower."""

    embeddings: Tensor
    """[image tokens, hidden]"""
    deepstack: tuple[Tensor, ...]
    """Features for the first language layers (Qwen3-VL), each [image tokens, hidden]; empty for other families."""

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(t.nbytes for t in (self.embeddings, *self.deepstack))

    def part(self, rows: slice) -> "ImageFeatures":
        """Those of some of its image tokens."""
        return ImageFeatures(self.embeddings[rows], tuple(layer[rows] for layer in self.deepstack))
