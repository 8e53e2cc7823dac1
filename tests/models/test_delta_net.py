"""transformers' own way through a gated delta net, which is what ours is compared with."""

import functools
import inspect
from collections.abc import Callable

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.bases import DEVICE
from tinsmith.models.base import BaseModel

FUNCTIONS = ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update"]


def test_it_computes_in_pytorch_where_kernels_are_installed(
    family_base: Callable[[str], BaseModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = family_base("qwen3_5").language_model.layers[0].linear_attn
    hidden = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = layer(hidden)
    for name in FUNCTIONS:

        def kernel(*arguments: object, **keywords: object) -> None:
            raise AssertionError("a kernel was called")

        written = inspect.unwrap(getattr(modeling_qwen3_5, name))
        monkeypatch.setattr(modeling_qwen3_5, name, functools.wraps(written)(kernel))
    kernels = [getattr(modeling_qwen3_5, name) for name in FUNCTIONS]
    with pytest.raises(AssertionError, match="a kernel was called"):
        type(layer).forward(layer, hidden)
    assert torch.equal(layer(hidden), expected)
    assert [getattr(modeling_qwen3_5, name) for name in FUNCTIONS] == kernels  # as they were
