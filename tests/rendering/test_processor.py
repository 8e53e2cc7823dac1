"""Patches of bytes, and the table of what a processor makes of each byte, are the model's own processor to the bit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from tinsmith.errors import ConfigError
from tinsmith.rendering.processor import LocalProcessor

MakeDirectory = Callable[[str], Path]

SETTINGS: list[dict[str, Any]] = [
    {},
    {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]},
    {"do_normalize": False},
    {"do_rescale": False, "do_normalize": False},
    {"resample": 2, "rescale_factor": 1 / 127.5},
    {"patch_size": 14, "merge_size": 3, "temporal_patch_size": 1, "size": {"shortest_edge": 42 * 42, "longest_edge": 420 * 420}},
]


def written(directory: Path, source: Path, settings: dict[str, Any]) -> Path:
    """A copy of a model's directory whose image processor has other settings."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return directory


def picture(width: int, height: int) -> Image.Image:
    """Random pixels."""
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(settings) or "usual")
def test_values_are_the_processor_s_to_the_bit(family_dir: MakeDirectory, tmp_path: Path, settings: dict[str, Any]) -> None:
    source = str(written(tmp_path, family_dir("qwen3_vl"), settings))
    ours, theirs = LocalProcessor(source), AutoImageProcessor.from_pretrained(source, backend="pil")
    for width, height in [(96, 64), (33, 200), (500, 333), (3, 3), (700, 640)]:
        made, expected = ours(b"", picture(width, height)), theirs(images=[picture(width, height)], return_tensors="pt")
        assert torch.equal(made.pixel_values, expected["pixel_values"])
        assert made.pixel_values_nbytes == expected["pixel_values"].nbytes
        assert [*made.grid_thw] == expected["image_grid_thw"][0].tolist()
        halves = made.levels.values(made.pixels, torch.bfloat16)
        assert torch.equal(halves, expected["pixel_values"].to(torch.bfloat16))


@pytest.mark.parametrize("settings", [{"do_resize": False}, {"image_processor_type": "CLIPImageProcessor"}])
def test_a_processor_that_computes_something_else_is_refused(family_dir: MakeDirectory, tmp_path: Path, settings: dict[str, Any]) -> None:
    source = written(tmp_path, family_dir("qwen3_vl"), settings)
    with pytest.raises(ConfigError, match=r"its image processor, \w+, does not compute what Qwen2VLImageProcessor computes"):
        LocalProcessor(str(source))
