"""What a pass keeps of a token, counted by hand."""

from collections.abc import Callable

import pytest
import torch

from tinsmith.memory.pass_memory import pass_memory_of
from tinsmith.models.base import BaseModel

ATTENTION = (128 + 64 + 64) + (128 + 64) + 128 + 4
"""Numbers of four heads of 32, two of keys and values: projections, what has turned, the output, its normalisers."""
GATED = (256 + 64 + 64) + (128 + 64) + 128 + 4
"""The same of Qwen3.5, whose queries come with a gate."""
ROWS = 2 * 64
"""What lies before both norms."""
CHOSEN = 2 * (2 * 48)
"""Gate and up of two experts of width 48."""
ROUTED = 8 * 4 + 2 * 40
"""Bytes of a token's probabilities of eight experts, and of the places and weights of two pairs."""


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a_layer_keeps_what_lies_behind_its_norm_and_goes_into_its_experts(
    family_base: Callable[[str], BaseModel], dtype: torch.dtype, size: int
) -> None:
    text, hybrid = family_base("qwen3_moe"), family_base("qwen3_5_moe")
    memory = pass_memory_of(text.layout, text.text_config, dtype)
    assert memory.kept == (size * (ATTENTION + ROWS + 64 + CHOSEN) + ROUTED,) * 2
    shared = 2 * 64 + 64  # gate and up of the shared expert, and its output
    last = pass_memory_of(hybrid.layout, hybrid.text_config, dtype).kept[-1]
    assert last == size * (GATED + ROWS + 64 + CHOSEN + shared) + ROUTED


def test_a_backward_has_gradients_of_the_inside_of_experts_and_of_copied_tokens(
    family_base: Callable[[str], BaseModel],
) -> None:
    """In float32 the formulas of SwiGLU run as written; in half precision the sum over a token's copies takes most."""
    base, rows, copies = family_base("qwen3_moe"), 2 * 64, 2 * 64
    of_float32, of_half = (
        pass_memory_of(base.layout, base.text_config, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert of_float32.transient == 4 * (rows + copies + 4 * CHOSEN + CHOSEN // 2)
    assert of_half.transient == 2 * (rows + 3 * copies + 2 * CHOSEN)
