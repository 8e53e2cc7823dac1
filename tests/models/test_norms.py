"""Norms of modules, and those of ours that stand in their place, compute the same; one that computes something else stays."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from tests.bases import DEVICE
from tinsmith.models.norms import FusedRMSNorm, GatedRMSNorm, ZeroCentredRMSNorm, fuse_norms

NORMS: list[tuple[type[nn.Module], type[nn.Module]]] = [
    (Qwen3RMSNorm, FusedRMSNorm),
    (GemmaRMSNorm, ZeroCentredRMSNorm),
    (Qwen3_5RMSNorm, ZeroCentredRMSNorm),
    (Qwen3_5RMSNormGated, GatedRMSNorm),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("theirs", "ours"), NORMS)
def test_norms_equal_those_of_transformers(theirs: type[nn.Module], ours: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain: Any
    fused: Any
    plain, fused = (nn.ModuleDict({"norm": theirs(48, eps=1e-5)}).to(DEVICE, dtype) for _ in range(2))
    plain["norm"].weight.data.uniform_(0.5, 6)
    fused.load_state_dict(plain.state_dict())
    assert fuse_norms(fused) == 1
    assert type(fused["norm"]) is ours
    inputs = [torch.randn(1, 9, 48).to(DEVICE, dtype).requires_grad_() for _ in range(1 + (ours is GatedRMSNorm))]
    grad = torch.randn(1, 9, 48).to(DEVICE, dtype)

    def answers(norm: nn.Module) -> list[Tensor]:
        out = norm(*inputs)
        return [out, *torch.autograd.grad(out, [*inputs, *norm.parameters()], grad)]

    bound = 4 * torch.finfo(dtype).eps
    for got, expected in zip(answers(fused["norm"]), answers(plain["norm"]), strict=True):
        torch.testing.assert_close(got, expected, rtol=8 * bound, atol=8 * bound)


def test_a_norm_that_computes_something_else_stays() -> None:
    class HalvedRMSNorm(Qwen3RMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            halved: Tensor = super().forward(hidden_states) / 2
            return halved

    model = nn.ModuleDict({"halved": HalvedRMSNorm(16), "layer": nn.LayerNorm(16)})
    assert fuse_norms(model) == 0
    assert isinstance(model["halved"], HalvedRMSNorm)
