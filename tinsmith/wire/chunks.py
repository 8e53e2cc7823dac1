"""The parts of a Tinker ModelInput, decoded: text tokens and images. Used for training datums and for prompts alike."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TextChunk:
    """Token ids from the client. The id of an image placeholder among them is text, never an image."""

    tokens: NDArray[np.int32]
    """[n]"""


@dataclass(frozen=True)
class ImageChunk:
    """One image. Its bytes are untrusted and not decoded yet."""

    sha256: bytes
    """32-byte digest of the encoded image: the key of its blob and of all caches."""
    data: bytes | None
    """The encoded image; None when it has to be read from the store by `sha256`."""
    format: str
    """The format that the client names: "png" or "jpeg"."""
    expected_tokens: int | None
    """Number of positions that the client expects; None if it does not say."""


Chunk = TextChunk | ImageChunk
