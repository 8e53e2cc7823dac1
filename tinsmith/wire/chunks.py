"""The decoded parts of a Tinker ModelInput, of datums and prompts alike."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TextChunk:
    """Token ids from the client. An image placeholder's id among them is text, never an image."""

    tokens: NDArray[np.int32]
    """[n]"""


@dataclass(frozen=True)
class ImageChunk:
    """One image, untrusted and not decoded."""

    sha256: bytes
    """Digest of the encoded image: the key of its blob and of all caches."""
    data: bytes | None
    """The encoded image; None if the store has it, by `sha256`."""
    format: str
    """As the client says: "png" or "jpeg"."""
    expected_tokens: int | None
    """Positions that the client expects, if it says so."""


Chunk = TextChunk | ImageChunk
