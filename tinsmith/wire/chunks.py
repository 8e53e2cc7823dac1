"""The parts of a Tinker ModelInput, decoded: text tokens and images. Used for training datums and for prompts alike."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TextChunk:
    """Tokens that the client chose. A placeholder id among them is text, never an image."""

    tokens: NDArray[np.int32]
    """[n]"""


@dataclass(frozen=True)
class ImageChunk:
    """One image. Its bytes are untrusted and not decoded yet."""

    sha256: bytes
    """32-byte digest of the encoded image: the key of its blob and of every cache."""
    data: bytes | None
    """The encoded image; None when it has to be read from the store by `sha256`."""
    format: str
    """What the client says it is: "png" or "jpeg"."""
    expected_tokens: int | None
    """How many positions the client counted for it, if it did."""


Chunk = TextChunk | ImageChunk
