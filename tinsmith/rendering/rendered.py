"""What rendering produces: one sequence of token ids, with the pictures that lie in it and the rotary positions of every token."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tinsmith.models.base import PictureInput
from tinsmith.models.families import ImageSpan


@dataclass(frozen=True, eq=False)
class RenderedInput:
    """A ModelInput as the model sees it. Trainer and sampler both work from this and from nothing else.

    Example: "<vision_start> picture of 4 tokens <vision_end> hi" has 7 token ids, one span (offset 1, length 4) and one picture.
    """

    token_ids: NDArray[np.int32]
    """[n]; the family's placeholder id at picture positions."""
    spans: tuple[ImageSpan, ...]
    """Where the pictures lie, in order, not overlapping."""
    pictures: tuple[PictureInput, ...]
    """One for each span."""
    positions: Tensor
    """[1 or 3, n] int64 rotary positions."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def next_position(self) -> int:
        """The rotary position of the token that follows. Asked for at every decoding step, so it is remembered."""
        return int(self.positions.max()) + 1
