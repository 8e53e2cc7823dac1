"""Moments of AdamW in 8 bits a number: logarithms, scaled by the largest number of each block of 256.

A number is |x| / scale = 2^-((top - code) · octaves / (top - 1)), with code 0 for 0: neighbouring codes are 9 % apart for first moments (a
sign and 7 bits, over 16 octaves), and 12 % for second moments (8 bits, over 40 octaves), of which the update takes the root.

Numbers between two codes are rounded up or down by chance, so that the expectation is exact: the change of a moment in one step is often
smaller than the distance of two codes. A second moment that is not 0 never becomes 0, because the update divides by its root. Rounding to
the nearest code, of numbers that came from codes, gives these codes again.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.memory.budget import MOMENT_BLOCK

BLOCK = MOMENT_BLOCK
"""Numbers that share a scale."""


@dataclass(frozen=True)
class Code:
    """Encoding of numbers in 8 bits."""

    top: int
    """The code of the largest number of a block."""
    octaves: float
    """Octaves between the largest and the smallest number that is not 0."""
    signed: bool

    @property
    def octaves_each(self) -> float:
        """Octaves between neighbouring codes."""
        return self.octaves / (self.top - 1)


FIRST, SECOND = Code(127, 16.0, signed=True), Code(255, 40.0, signed=False)


def decode(codes: Tensor, scales: Tensor, code: Code) -> Tensor:
    """Turn codes [blocks, width] uint8 and scales [blocks, 1] into numbers [blocks, width] float32."""
    wide = codes.to(torch.int32)
    level = wide & code.top
    size = torch.where(level == 0, 0.0, torch.exp2((level - code.top).float() * code.octaves_each) * scales)
    return torch.where(wide > code.top, -size, size) if code.signed else size


def encode(values: Tensor, code: Code, chance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Turn numbers [blocks, width] float32 into codes uint8 and scales [blocks, 1].

    `chance` [blocks, width] in [0, 1) decides which of the two neighbours a number becomes; None means the nearest.
    """
    size = values.abs()
    scales = size.amax(-1, keepdim=True)
    share = size / torch.where(scales == 0, 1.0, scales)  # [blocks, width], 0 to 1
    place = code.top + torch.log2(share) / code.octaves_each
    low = place.floor().clamp(0, code.top)
    lower = torch.where(low == 0, 0.0, torch.exp2((low - code.top) * code.octaves_each))
    upper = torch.exp2((low + 1 - code.top) * code.octaves_each)
    up = (share - lower) / (upper - lower) > (0.5 if chance is None else chance)
    level = (low + up).clamp(0 if code.signed else 1, code.top)
    level = torch.where(share == 0, 0.0, level).to(torch.uint8)
    return torch.where(values < 0, level + (code.top + 1), level) if code.signed else level, scales


def chances(like: Tensor, seed: Tensor) -> Tensor:
    """Numbers in [0, 1) in the shape of `like` [blocks, width]: a function of `seed` [] int64 and place, the same on every device.

    A mixing function of 32 bits (Wellons, "lowbias32") of the place, with the seed added.
    """
    blocks, width = like.shape
    x = torch.arange(blocks * width, device=like.device).view(blocks, width) + seed & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * factor & 0xFFFFFFFF
    return ((x ^ x >> 16) >> 8).float() * 2**-24
