"""The part of the self-check that looks at pictures: our way through the vision tower against transformers' own.

Random pictures of two sizes go through ours together, and through theirs one after the other.
"""

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.models.pictures import PictureFeatures, PictureInput
from tinsmith.rendering.processor import LocalProcessor
from tinsmith.sampling.rounding import NOISE, rounded_otherwise

SIZES = ((150, 230), (64, 40), (150, 230))
"""Width and height of the pictures; the model's processor may enlarge them. The larger ones have several windows, some of them cut."""
EXACT = 1e-4
"""Largest difference of a picture's features in float32, relative to their size."""
ROUNDED = 0.02
"""The same that is normal in half precision: a number is rounded by up to 0.004 of itself in bfloat16, a few times on its way."""


def check_tower(base: BaseModel, processor: LocalProcessor, quick: bool = False) -> None:
    """Raise ConfigError if features of pictures differ from those of transformers' tower; `quick` takes one picture of each size."""
    generator = np.random.default_rng(0)
    sizes = SIZES[:2] if quick else SIZES
    images = [Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in sizes]
    pictures = [processor(bytes([number]) * 32, image) for number, image in enumerate(images)]
    ours = [_layers(features) for features in base.tower.features(pictures)]
    theirs = [_transformers_layers(base, picture) for picture in pictures]
    allowed = EXACT
    if base.dtype != torch.float32:
        with rounded_otherwise(base.network.model.visual):
            others = [_transformers_layers(base, picture) for picture in pictures]
        allowed = max(ROUNDED, NOISE * _difference(others, theirs))
    difference = _difference(ours, theirs)
    if not difference <= allowed:  # also when it is NaN
        raise ConfigError(
            f"transformers computes other features of pictures: they differ by {difference:.3g} of their size, allowed is {allowed:.3g}"
        )


def _layers(features: PictureFeatures) -> list[Tensor]:
    """All features of a picture, each [image tokens, hidden]."""
    return [features.embeddings, *features.deepstack]


def _transformers_layers(base: BaseModel, picture: PictureInput) -> list[Tensor]:
    """The same by transformers' tower; some versions of it leave the features of several pictures in one piece."""
    pixels = picture.pixel_values.to(base.device, base.dtype)
    output = base.network.model.get_image_features(pixels, torch.tensor([picture.grid_thw], device=base.device), return_dict=True)
    layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    return [layer if isinstance(layer, Tensor) else layer[0] for layer in layers]


def _difference(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> float:
    """The largest of any picture and layer, relative to the size of the features."""
    pairs = [(a.float(), b.float()) for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True)]
    return torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item()
