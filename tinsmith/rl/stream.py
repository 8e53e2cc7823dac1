"""`TokenStream`: a sequence as the model sees it, token ids with pictures in between."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import tinker
from numpy.typing import ArrayLike, NDArray

from tinsmith.rl.pictures import Picture


@dataclass(frozen=True)
class PlacedPicture:
    """A picture that covers the positions `offset` to `offset + picture.tokens`."""

    offset: int
    picture: Picture


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Token ids and the pictures among them.

    Example: ids [9, 7, 7, 4] with one picture of two tokens at offset 1, where 7 is the placeholder. A 7 that no picture covers is text.
    """

    ids: NDArray[np.int32]
    """[n]; every position of a picture holds the placeholder's id."""
    pictures: tuple[PlacedPicture, ...] = ()
    """In order of their offsets, not overlapping."""

    def __len__(self) -> int:
        return len(self.ids)

    def __add__(self, other: "TokenStream") -> "TokenStream":
        return join((self, other))

    def begins_with(self, other: "TokenStream") -> bool:
        """Whether `other` is a prefix: the same tokens, and the same pictures at the same places."""
        if not np.array_equal(self.ids[: len(other)], other.ids):
            return False
        return tuple(placed for placed in self.pictures if placed.offset < len(other)) == other.pictures

    def head(self, length: int) -> "TokenStream":
        """The first `length` positions; no picture may reach beyond them."""
        return TokenStream(self.ids[:length], tuple(placed for placed in self.pictures if placed.offset < length))

    @cached_property
    def model_input(self) -> tinker.ModelInput:
        """The stream as the SDK takes it: text chunks, and every picture as a chunk of its own."""
        chunks: list[tinker.ModelInputChunk] = []
        at = 0
        for placed in self.pictures:
            if placed.offset > at:
                chunks.append(tinker.EncodedTextChunk(tokens=self.ids[at : placed.offset].tolist()))
            chunks.append(placed.picture.chunk)
            at = placed.offset + placed.picture.tokens
        if at < len(self):
            chunks.append(tinker.EncodedTextChunk(tokens=self.ids[at:].tolist()))
        return tinker.ModelInput(chunks=chunks)


def text_stream(ids: ArrayLike) -> TokenStream:
    """A stream without pictures."""
    return TokenStream(np.asarray(ids, dtype=np.int32))


def join(streams: Sequence[TokenStream]) -> TokenStream:
    """At least one stream, one after the other."""
    pictures: list[PlacedPicture] = []
    offset = 0
    for stream in streams:
        pictures += [PlacedPicture(offset + placed.offset, placed.picture) for placed in stream.pictures]
        offset += len(stream)
    return TokenStream(np.concatenate([stream.ids for stream in streams]), tuple(pictures))
