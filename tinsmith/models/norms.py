"""RMS normalisation in one kernel. transformers spells it out in ten, which on a GPU cost as much time as a large multiplication.

On a CPU torch has no such kernel: its rms_norm is ten operations, too, and twenty more in the backward. There both are written by hand in
half the number of passes over the row.

Only modules that compute exactly this are replaced: each is tried on random numbers first, so a family that normalises differently
(Gemma multiplies by 1 + weight) keeps its own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vecdot, vector_norm
from torch.nn.functional import rms_norm


class FusedRMSNorm(nn.Module):
    """weight · x / sqrt(mean(x²) + eps) over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., hidden]."""
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        if not torch.is_grad_enabled():
            return _normalised(x, self.weight, self.eps)[0]
        compute: Any = _CpuRMSNorm.apply
        y: Tensor = compute(x, self.weight, self.eps)
        return y


def _normalised(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and 1 / sqrt(mean(x²) + eps) [..., 1]."""
    r: Tensor = vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * r).mul_(weight), r


class _CpuRMSNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x²) + eps) and g = dy · weight: dx = r · g - x · r³ · mean(g · x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, r = _normalised(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, r = ctx.saved_tensors
        grad_weight = (dy * x).mul_(r).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        g = dy * weight
        mean = vecdot(g, x).unsqueeze(-1).div_(x.shape[-1])
        return g.mul_(r).addcmul_(x, mean.mul_(r**3), value=-1), grad_weight, None


def fuse_norms(model: nn.Module) -> int:
    """Replace every RMSNorm of `model` that a `FusedRMSNorm` equals within the rounding of its dtype; returns how many."""
    replaced = 0
    for name, module in list(model.named_modules()):
        fused = _fused_twin(module)
        if fused is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, fused)
            replaced += 1
    return replaced


def _fused_twin(module: nn.Module) -> FusedRMSNorm | None:
    """The fused form of a module that is an RMSNorm as transformers writes it, if their results agree."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    fused = FusedRMSNorm(weight, eps)
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(8, len(weight), generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad():
        expected, got = module(x).float(), fused(x).float()
    close = torch.allclose(got, expected, rtol=4 * torch.finfo(weight.dtype).eps, atol=1e-6)
    return fused if close else None
