"""The self-check refuses a tower that is not transformers' own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.bases import load
from tinsmith.errors import ConfigError
from tinsmith.models import vision_tower
from tinsmith.sampling.self_check import check_base_model


def one_span(own: Any, lengths: list[int], device: torch.device, dtype: torch.dtype) -> Any:
    """As if all pictures were one."""
    return own([sum(lengths)], device, dtype)


def across(own: Any, grid: tuple[int, int, int], merge: int) -> Any:
    """Rows for columns."""
    return own(grid, merge)[::-1]


def unsorted(own: Any, grid: tuple[int, int, int], merge: int, window: int) -> Any:
    """Windows of the right sizes with the wrong patches."""
    order, lengths = own(grid, merge, window)
    return np.sort(order), lengths


def unturned(own: Any, x: Tensor, *angles: Tensor, **settings: object) -> Tensor:
    """No rotation."""
    return x


@pytest.mark.parametrize(
    ("family", "part", "fault", "dtype"),
    [
        ("qwen3_vl", "Spans", one_span, "float32"),
        ("qwen3_vl", "Spans", one_span, "bfloat16"),
        ("qwen3_5", "patch_places", across, "float32"),
        ("qwen3_5", "patch_places", across, "bfloat16"),
        ("qwen3_vl", "rotate", unturned, "float32"),
        ("qwen3_vl", "rotate", unturned, "bfloat16"),
        ("qwen2_5_vl", "window_order", unsorted, "float32"),  # the tiny model's windows matter too little for bfloat16
    ],
)
def test_a_tower_that_computes_otherwise_is_refused(
    family_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, part: str, fault: Any, dtype: str
) -> None:
    own = getattr(vision_tower, part)
    monkeypatch.setattr(vision_tower, part, lambda *arguments, **settings: fault(own, *arguments, **settings))
    with pytest.raises(ConfigError, match=r"cannot be served: transformers computes other features of pictures: they differ by \d"):
        check_base_model(load(family_dir(family), dtype=dtype), samples=False)
