"""A rendered sequence: token ids, with its images and the rotary positions of every token."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith.models.families import ImageSpan
from tinsmith.models.pictures import PictureInput


@dataclass(frozen=True, eq=False)
class RenderedInput:
    """A ModelInput as the model sees it. Trainer and sampler both work from this and from nothing else.

    Example: "<vision_start> picture of 4 tokens <vision_end> hi" has 7 token ids, one span (offset 1, length 4) and one picture.
    """

    token_ids: NDArray[np.int32]
    """[n]; the family's placeholder id at picture positions."""
    spans: tuple[ImageSpan, ...]
    """Places of the images, in order, not overlapping."""
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

    @cached_property
    def is_text(self) -> NDArray[np.bool_]:
        """[n] True where a token is text, False inside pictures: a picture's tokens are not predicted, so that they have no scores."""
        text = np.ones(len(self), dtype=np.bool_)
        for span in self.spans:
            text[span.offset : span.offset + span.length] = False
        return text

    def part(self, start: int, end: int) -> "RenderedInput":
        """Tokens [start, end). Of a picture that is cut, the span and the rows of its features that lie inside remain."""
        spans, pictures = [], []
        for span, picture in zip(self.spans, self.pictures, strict=True):
            first, last = max(span.offset, start), min(span.offset + span.length, end)
            if first < last:
                spans.append(replace(span, offset=first - start, length=last - first))
                skipped = picture.rows.start + first - span.offset
                pictures.append(replace(picture, rows=slice(skipped, skipped + last - first)))
        return RenderedInput(self.token_ids[start:end], tuple(spans), tuple(pictures), self.positions[:, start:end])

    def followed_by(self, tail: "RenderedInput") -> "RenderedInput":
        """This and then `tail`, whose positions go on from here."""
        moved = (replace(span, offset=span.offset + len(self)) for span in tail.spans)
        return RenderedInput(
            np.concatenate([self.token_ids, tail.token_ids]),
            (*self.spans, *moved),
            self.pictures + tail.pictures,
            torch.cat([self.positions, tail.positions], dim=1),
        )
