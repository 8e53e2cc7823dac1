"""A rendered sequence: token ids, with its images and the rotary positions of every token."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith.models.families import ImageSpan
from tinsmith.models.vision_tower import ImageInput


@dataclass(frozen=True, eq=False)
class RenderedInput:
    """A ModelInput as the model sees it: all that trainer and sampler work from.

    Example: "<vision_start> image of 4 tokens <vision_end> hi" has 7 token ids, a span (offset 1, length 4), an image.
    """

    token_ids: NDArray[np.int32]
    """[n]; the family's placeholder id at image positions."""
    spans: tuple[ImageSpan, ...]
    """Places of the images, in order, not overlapping."""
    images: tuple[ImageInput, ...]
    """One for each span."""
    positions: Tensor
    """[1 or 3, n] int64 rotary positions."""
    routes: NDArray[np.int16] | None = None
    """[mixtures, n, per_token] experts to follow, -1 for tokens whose router chooses; None if it always does."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def next_position(self) -> int:
        """Rotary position of the token that follows, remembered because every decoding step asks for it."""
        return int(self.positions.max()) + 1

    @cached_property
    def is_text(self) -> NDArray[np.bool_]:
        """[n] True where a token is text, False inside images, whose tokens are not predicted."""
        text = np.ones(len(self), dtype=np.bool_)
        for span in self.spans:
            text[span.offset : span.offset + span.length] = False
        return text

    @property
    def identity(self) -> NDArray[np.int64]:
        """[n] the token ids; at the positions of an image the `image_mark` of its bytes."""
        marked = self.token_ids.astype(np.int64)
        for span, image in zip(self.spans, self.images, strict=True):
            marked[span.offset : span.offset + span.length] = image_mark(image.sha256)
        return marked

    def part(self, start: int, end: int) -> "RenderedInput":
        """Cut out tokens [start, end).

        Of an image that is cut, the span and the rows of its features that lie inside remain.
        """
        spans, images = [], []
        for span, image in zip(self.spans, self.images, strict=True):
            first, last = max(span.offset, start), min(span.offset + span.length, end)
            if first < last:
                spans.append(replace(span, offset=first - start, length=last - first))
                skipped = image.rows.start + first - span.offset
                images.append(replace(image, rows=slice(skipped, skipped + last - first)))
        routes = None if self.routes is None else self.routes[:, start:end]
        return RenderedInput(
            self.token_ids[start:end], tuple(spans), tuple(images), self.positions[:, start:end], routes
        )

    def followed_by(self, tail: "RenderedInput") -> "RenderedInput":
        """Append `tail`, whose positions go on from here. The router chooses the experts of all tokens."""
        moved = (replace(span, offset=span.offset + len(self)) for span in tail.spans)
        return RenderedInput(
            np.concatenate([self.token_ids, tail.token_ids]),
            (*self.spans, *moved),
            self.images + tail.images,
            torch.cat([self.positions, tail.positions], dim=1),
        )


def image_mark(sha256: bytes) -> int:
    """Return a negative number that stands for an image, by the SHA-256 of its bytes, where token ids are compared."""
    return -1 - int.from_bytes(sha256[:7])
