"""The self-check's part for images: our vision tower against transformers', and the rounding noise allowed.

Random images of two sizes go through ours together, and through theirs one after the other.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.models.vision_tower import ImageFeatures, ImageInput
from tinsmith.rendering.processor import LocalProcessor

SIZES = ((150, 230), (64, 40), (150, 230))
"""Width and height of the images; the larger ones have several windows, some of them cut."""
EXACT = 1e-4
"""Largest difference in float32: of a log-probability; of a gradient or an image's features, relative to their size."""
ROUNDED = 0.02
"""The same in half precision: bfloat16 rounds a number by up to 0.004 of itself, a few times on its way."""


def check_tower(base: BaseModel, processor: LocalProcessor, quick: bool = False) -> None:
    """Raise ConfigError if features differ from those of transformers' tower; `quick` takes one image of each size."""
    generator = np.random.default_rng(0)
    sizes = SIZES[:2] if quick else SIZES
    drawn = [Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in sizes]
    images = [processor(bytes([number]) * 32, image) for number, image in enumerate(drawn)]
    ours = [_layers(features) for features in base.tower.features(images)]
    theirs = [_transformers_layers(base, image) for image in images]
    allowed = EXACT
    if base.dtype != torch.float32:
        with rounded_otherwise(base.network.model.visual):
            others = [_transformers_layers(base, image) for image in images]
        allowed = max(ROUNDED, NOISE * _difference(others, theirs))
    refuse("transformers computes other features of images, relative to their size", _difference(ours, theirs), allowed)


def refuse(what: str, found: float, allowed: float) -> None:
    """Raise ConfigError if a difference is larger than allowed, or NaN."""
    if not found <= allowed:
        raise ConfigError(f"{what}: off by {found:.3g}, allowed is {allowed:.3g}")


def _layers(features: ImageFeatures) -> list[Tensor]:
    return [features.embeddings, *features.deepstack]


def _transformers_layers(base: BaseModel, image: ImageInput) -> list[Tensor]:
    """Compute the features by transformers' tower; some versions of it leave those of several images in one piece."""
    pixels = image.pixel_values.to(base.device, base.dtype)
    output = base.network.model.get_image_features(
        pixels, torch.tensor([image.grid_thw], device=base.device), return_dict=True
    )
    layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    return [layer if isinstance(layer, Tensor) else layer[0] for layer in layers]


def _difference(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> float:
    pairs = [
        (a.float(), b.float())
        for mine, other in zip(ours, theirs, strict=True)
        for a, b in zip(mine, other, strict=True)
    ]
    return torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item()


NOISE = 3.0
"""Largest difference from transformers in half precision, in multiples of its own under other roundings."""
EXACT_NOISE = 10.0
"""The same in float32, for models that enlarge rounding.

It is larger because single values count, not means, and sums inside a module round more often than its output does.
"""


@contextmanager
def rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Change outputs of the model's linears, norms and so on by up to one unit of their last place, at random."""
    generators: dict[torch.device, torch.Generator] = {}

    def change(_module: object, _inputs: object, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(0)
        drawn = torch.rand(output.shape, generator=generators[output.device], device=output.device)
        relative = torch.finfo(output.dtype).eps / 2 * (2 * drawn - 1)
        return (output * (1 + relative)).to(output.dtype)

    with ExitStack() as hooks:
        for module in model.modules():
            if not list(module.children()):
                hooks.enter_context(module.register_forward_hook(change))
        yield
