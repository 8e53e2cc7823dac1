"""Fused norms equal transformers' own, and a norm that is something else is left alone."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tinsmith.models.norms import FusedRMSNorm, fuse_norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_equal_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain: Any = nn.ModuleDict({"norm": Qwen3RMSNorm(48, eps=1e-5)}).to(dtype)
    plain["norm"].weight.data.uniform_(0.5, 6)
    fused: Any = nn.ModuleDict({"norm": Qwen3RMSNorm(48, eps=1e-5)}).to(dtype)
    fused.load_state_dict(plain.state_dict())
    assert fuse_norms(fused) == 1
    assert isinstance(fused["norm"], FusedRMSNorm)
    x = torch.randn(1, 9, 48, dtype=dtype).requires_grad_()
    grad = torch.randn(1, 9, 48, dtype=dtype)
    bound = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(fused["norm"](x), plain["norm"](x), rtol=bound, atol=bound)
    got = torch.autograd.grad(fused["norm"](x), [x, fused["norm"].weight], grad)
    expected = torch.autograd.grad(plain["norm"](x), [x, plain["norm"].weight], grad)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=8 * bound, atol=8 * bound)


def test_a_norm_that_computes_something_else_stays() -> None:
    model = nn.ModuleDict({"gemma": GemmaRMSNorm(16), "layer": nn.LayerNorm(16)})
    assert fuse_norms(model) == 0
    assert isinstance(model["gemma"], GemmaRMSNorm)
