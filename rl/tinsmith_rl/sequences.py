"""Sequences as the model sees them: token ids with images in between.

An image is encoded once, when it enters a conversation, and the same bytes go to the sampler and to the trainer. In a
`TokenSequence` it covers as many positions as the model makes of it; each of them holds the id of the model's
placeholder token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import tinker
from numpy.typing import ArrayLike, NDArray
from transformers import AutoConfig, AutoImageProcessor

from tinsmith_rl.errors import UserError, translated
from tinsmith_rl.images import Format, encode


@dataclass(frozen=True)
class EncodedImage:
    """An image file, and how many positions of a sequence it takes."""

    data: bytes
    format: Format
    tokens: int

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, in hexadecimal."""
        return sha256(self.data).hexdigest()

    @cached_property
    def chunk(self) -> tinker.types.ImageChunk:
        """The image in the SDK's form, made once for all prompts that contain it."""
        return tinker.types.ImageChunk(data=self.data, format=self.format, expected_tokens=self.tokens)


@dataclass(frozen=True)
class PlacedImage:
    """An image at the positions `offset` to `offset + image.tokens`."""

    offset: int
    image: EncodedImage


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """Token ids and the images among them.

    Example: ids [9, 7, 7, 4] with an image of two tokens at offset 1, where 7 is the placeholder. A 7 that no image
    covers is text.
    """

    ids: NDArray[np.int32]
    """[n]; every position of an image holds the placeholder's id."""
    images: tuple[PlacedImage, ...] = ()
    """Ordered by offset, not overlapping."""

    def __len__(self) -> int:
        return len(self.ids)

    def __add__(self, other: "TokenSequence") -> "TokenSequence":
        return concatenate((self, other))

    def begins_with(self, other: "TokenSequence") -> bool:
        """Whether `other` is a prefix: the same tokens, and the same images at the same places."""
        if not np.array_equal(self.ids[: len(other)], other.ids):
            return False
        return tuple(placed for placed in self.images if placed.offset < len(other)) == other.images

    def head(self, length: int) -> "TokenSequence":
        """The first `length` positions; no image may extend beyond them."""
        return TokenSequence(self.ids[:length], tuple(placed for placed in self.images if placed.offset < length))

    @cached_property
    def model_input(self) -> tinker.ModelInput:
        """The sequence in the SDK's form: chunks of text, and a chunk for each image."""
        chunks: list[tinker.ModelInputChunk] = []
        at = 0
        for placed in self.images:
            if placed.offset > at:
                chunks.append(tinker.EncodedTextChunk(tokens=self.ids[at : placed.offset].tolist()))
            chunks.append(placed.image.chunk)
            at = placed.offset + placed.image.tokens
        if at < len(self):
            chunks.append(tinker.EncodedTextChunk(tokens=self.ids[at:].tolist()))
        return tinker.ModelInput(chunks=chunks)


def text_sequence(ids: ArrayLike) -> TokenSequence:
    """A sequence without images."""
    return TokenSequence(np.asarray(ids, dtype=np.int32))


def image_sequence(image: EncodedImage, placeholder_id: int) -> TokenSequence:
    """A sequence that consists of one image."""
    return TokenSequence(np.full(image.tokens, placeholder_id, dtype=np.int32), (PlacedImage(0, image),))


def concatenate(sequences: Sequence[TokenSequence]) -> TokenSequence:
    """One or more sequences, one after the other."""
    images: list[PlacedImage] = []
    offset = 0
    for sequence in sequences:
        images += [PlacedImage(offset + placed.offset, placed.image) for placed in sequence.images]
        offset += len(sequence)
    return TokenSequence(np.concatenate([sequence.ids for sequence in sequences]), tuple(images))


class ImageProcessor:
    """The image processor of a vision-language model, from the model's files in `source` (a directory or a Hub id)."""

    def __init__(self, source: str) -> None:
        self.placeholder_id = int(AutoConfig.from_pretrained(source, trust_remote_code=False).image_token_id)
        self._processor: Any = AutoImageProcessor.from_pretrained(source, backend="pil", trust_remote_code=False)
        self._token_counts: dict[tuple[int, int], int] = {}

    def image(self, source: Any) -> EncodedImage:
        """The encoded image with its number of tokens.

        Raises UserError as `encode` does, and for a size that the model does not take.
        """
        data, file_format, size = encode(source)
        if size not in self._token_counts:
            width, height = size
            with translated(
                ValueError, lambda error: UserError(f"the model takes no image of {width} x {height} pixels: {error}")
            ):
                patches = self._processor.get_number_of_image_patches(height, width, {})
            self._token_counts[size] = int(patches) // self._processor.merge_size**2
        return EncodedImage(data, file_format, self._token_counts[size])


def takes_images(source: str) -> bool:
    """Whether the model in `source` (a directory or a Hub id) has a placeholder token for images."""
    return hasattr(AutoConfig.from_pretrained(source, trust_remote_code=False), "image_token_id")
