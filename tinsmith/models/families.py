"""What differs between model families, in one place each. Everything else about a model is read from its configuration."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.errors import ConfigError

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary types whose angles do not depend on how long the row is; with the others, packing would change the numbers."""


@dataclass(frozen=True)
class Family:
    """A model architecture as transformers names it (`model_type`), and how Tinsmith treats it."""

    model_type: str
    takes_images: bool = False
    mrope: bool = False
    """Positions have three rows: time, height and width of a picture's patches."""
    attention_targets: tuple[str, ...] = ATTENTION_TARGETS
    mlp_targets: tuple[str, ...] = MLP_TARGETS


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama"),
        Family("mistral"),
        Family("qwen2"),
        Family("qwen3"),
        Family("qwen2_5_vl", takes_images=True, mrope=True),
        Family("qwen3_vl", takes_images=True, mrope=True),
    )
}


def family_of(model_type: str) -> Family:
    """The family of a transformers `model_type`. Raises ConfigError with those there are."""
    if model_type not in FAMILIES:
        raise ConfigError(f"model type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


@dataclass(frozen=True)
class ImageSpan:
    """Where one picture lies in a sequence: positions [offset, offset + length), a (t, h, w) grid of patches."""

    offset: int
    length: int
    grid_thw: tuple[int, int, int]


def positions(family: Family, length: int, spans: tuple[ImageSpan, ...], merge_size: int) -> Tensor:
    """Rotary positions of a sequence of `length` tokens: [1, length], or [3, length] for an M-RoPE family.

    M-RoPE (Qwen2-VL, arXiv 2409.12191): text advances all three rows together; a picture keeps time still and counts its merged
    rows and columns; what follows starts after the larger of the two.
    """
    if not family.mrope:
        return torch.arange(length).unsqueeze(0)
    parts, end, start = [], 0, 0
    for span in spans:
        text = span.offset - end
        parts.append(_text_positions(start, text))
        start += text
        height, width = span.grid_thw[1] // merge_size, span.grid_thw[2] // merge_size
        parts.append(_picture_positions(start, span.grid_thw[0], height, width))
        start += max(height, width)
        end = span.offset + span.length
    parts.append(_text_positions(start, length - end))
    return torch.cat(parts, dim=1)


def _text_positions(start: int, count: int) -> Tensor:
    return torch.arange(start, start + count).expand(3, -1)


def _picture_positions(start: int, frames: int, height: int, width: int) -> Tensor:
    grid = torch.stack(torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij"))
    return grid.reshape(3, -1) + start
