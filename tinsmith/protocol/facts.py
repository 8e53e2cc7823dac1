"""Facts about a base model for the processes without tensors."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tinsmith.errors import NotFoundError, UserError
from tinsmith.wire.images import ImageHeader

_NARROWEST = 200
"""Length of an image by its width, at most."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a base model, to validate requests and to answer get_info and get_server_capabilities."""

    name: str
    """Name that clients use; `name:suffix` means the same model."""
    tokenizer_id: str
    """Hub id, or the absolute path of a local directory."""
    architecture: str
    vocab_size: int
    max_context: int
    """The longest sequence that the model, or its setting, allows."""
    max_trained: int
    """Longest sequence that the memory of the device can train; 0 if it has no room for any."""
    max_sampled: int
    """Longest that the sampler has room for, prompt and answer together."""
    takes_images: bool
    max_lora_rank: int
    token_edge: int = 0
    """Pixels of the edge of an image's token; 0 without images."""
    least_pixels: int = 0
    """Pixels to which its image processor enlarges smaller images."""
    most_pixels: int = 0
    """Pixels to which it reduces larger ones."""

    def image_tokens(self, image: ImageHeader) -> int:
        """Return the number of tokens of an image, as the worker's processor counts them.

        Edges become multiples of a token's, after the image is enlarged or reduced to what the processor takes.
        Raises UserError for a model of text alone, and for an image that is too narrow.
        """
        if not self.token_edge:
            raise UserError(f"messages: {self.name} takes text only; leave images out")
        edge, sides = self.token_edge, (image.height, image.width)
        if max(sides) > _NARROWEST * min(sides):
            raise UserError(
                f"messages: the image of {image.width} x {image.height} pixels is too narrow; one side may be at most "
                f"{_NARROWEST} times the other"
            )
        across = [round(side / edge) for side in sides]
        if (pixels := math.prod(across) * edge**2) > self.most_pixels:
            ratio = math.sqrt(math.prod(sides) / self.most_pixels)
            across = [max(1, math.floor(side / ratio / edge)) for side in sides]
        elif pixels < self.least_pixels:
            ratio = math.sqrt(self.least_pixels / math.prod(sides))
            across = [math.ceil(side * ratio / edge) for side in sides]
        return math.prod(across)

    @property
    def trains(self) -> bool:
        return self.max_trained > 0

    @property
    def advertised_context(self) -> int:
        """Length that clients are told (`max_context_length`)."""
        return advertised_context(self.max_trained, self.max_sampled)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def advertised_context(trained: int, sampled: int) -> int:
    """Return the longest sequence that can be sampled and trained; if none trains, that can be sampled."""
    return min(trained, sampled) if trained else sampled


def find_base(asked: str, names: Iterable[str]) -> str:
    """Return the served base model that `asked` means: its name, or its name and a ":suffix". Raises NotFoundError."""
    known = list(names)
    for name in (asked, asked.rpartition(":")[0], asked.partition(":")[0]):
        if name in known:
            return name
    raise NotFoundError(f"base_model {asked!r} is not served here; there are: {', '.join(known)}")
