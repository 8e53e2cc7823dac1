"""Our way through the vision tower: transformers' numbers, for images of many sizes in one call, in every family and
precision.

Invariant: Images of all sizes in one call have the features that each has alone, and that transformers computes.
Also: `tests/sampling/test_self_check.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import image, load, renderer
from tinsmith.models import vision_tower
from tinsmith.models.base import BaseModel
from tinsmith.models.families import IMAGE_FAMILIES
from tinsmith.models.vision_tower import ImageFeatures, ImageInput, VisionTower

SIZES = [(96, 64), (64, 160), (96, 64), (33, 200), (300, 500)]
"""Widths and heights. Of most of them, Qwen2.5-VL's windows have several sizes."""


def images_of(base: BaseModel) -> list[ImageInput]:
    render = renderer(base)
    return [render.render([image(seed, *size)]).images[0] for seed, size in enumerate(SIZES)]


def layers(features: ImageFeatures) -> list[Tensor]:
    """Embeddings, and those of the deepstack layers."""
    return [features.embeddings, *features.deepstack]


@torch.no_grad()
def transformers_layers(base: BaseModel, image: ImageInput) -> list[Tensor]:
    """The same of one image, by transformers' tower."""
    pixels, grid = image.pixel_values.to(base.device, base.dtype), torch.tensor([image.grid_thw], device=base.device)
    output: Any = base.network.model.get_image_features(pixels, grid, return_dict=True)
    found = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    return [layer if isinstance(layer, Tensor) else layer[0] for layer in found]


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_images_of_all_sizes_together_are_each_alone_and_transformers(
    family_base: Callable[[str], BaseModel], family: str
) -> None:
    base = family_base(family)
    images = images_of(base)
    for one, together in zip(images, base.tower.features(images), strict=True):
        (alone,) = base.tower.features([one])
        expected = transformers_layers(base, one)
        assert len(expected) == 1 + (family in ("qwen3_vl", "qwen3_vl_moe"))
        for mine, lone, theirs in zip(layers(together), layers(alone), expected, strict=True):
            torch.testing.assert_close(mine, lone, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_in_bfloat16_we_are_no_further_off_than_transformers(
    family_base: Callable[[str], BaseModel], family_dir: Callable[[str], Path], family: str
) -> None:
    exact, rounded = family_base(family), load(family_dir(family), dtype="bfloat16")
    images = images_of(exact)
    ours, theirs = [], []
    for one, features in zip(images, rounded.tower.features(images), strict=True):
        expected = transformers_layers(exact, one)
        ours += [(mine.float() - right).abs().flatten() for mine, right in zip(layers(features), expected, strict=True)]
        theirs += [
            (x.float() - right).abs().flatten()
            for x, right in zip(transformers_layers(rounded, one), expected, strict=True)
        ]
    assert torch.cat(ours).median() <= 1.1 * torch.cat(theirs).median()


def test_images_of_two_renderers_keep_their_own_levels(vision_base: BaseModel) -> None:
    """As those of a self-check and of a server would, whose processors were loaded apart."""
    images = [image for _ in range(2) for image in images_of(vision_base)[:2]]
    assert len({id(image.levels) for image in images}) == 2
    first, second, third, fourth = (features.embeddings for features in vision_base.tower.features(images))
    torch.testing.assert_close(first, third)
    torch.testing.assert_close(second, fourth)


def test_limits_of_memory_change_no_features(vision_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """More images than go through at once, and more sizes than what follows from them is kept of."""
    images = images_of(vision_base)
    whole = vision_base.tower.features(images)
    monkeypatch.setattr(vision_tower, "PATCHES_AT_ONCE", 100)
    monkeypatch.setattr(vision_tower, "GRID_BYTES", 2**17)
    tower = VisionTower(vision_base.network.model.visual, vision_base.device, vision_base.dtype)
    parts = tower.features(images)
    assert 0 < len(tower.grids) < len({image.grid_thw for image in images})
    for one, part, again in zip(whole, parts, tower.features(images), strict=True):
        torch.testing.assert_close(one.embeddings, part.embeddings, rtol=1e-5, atol=1e-5)
        assert torch.equal(part.embeddings, again.embeddings)
