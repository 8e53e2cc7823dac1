"""RMS normalisation in few kernels. transformers spells it out in ten, which on a GPU cost as much time as a large multiplication.

Only modules that compute exactly this are replaced: each is tried on random numbers first, so a family that normalises in another way keeps
its own.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu


class FusedRMSNorm(nn.Module):
    """weight · x / sqrt(mean(x²) + eps) over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., hidden]."""
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class ZeroCentredRMSNorm(FusedRMSNorm):
    """The same with 1 + weight in place of the weight, in float32, and rounded once (Qwen3.5, Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        return _recomputed(self._norm, x, self.weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(dtype), weight.shape, 1 + weight.to(dtype), self.eps).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """The plain one times SiLU of a gate, in float32, and rounded once (gated delta nets)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise x [..., hidden], and multiply by what the gate of the same shape lets through."""
        return _recomputed(self._norm, x, gate, self.weight)

    def _norm(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return (rms_norm(x.to(dtype), weight.shape, weight.to(dtype), self.eps) * silu(gate.to(dtype))).to(x.dtype)


def _recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """The function of these inputs, of which nothing but the inputs is kept for the backward: it computes the function again."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    compute: Any = _Recomputed.apply
    out: Tensor = compute(function, *inputs)
    return out


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(wanted) for x, wanted in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grads))
        return None, *(next(found) if wanted else None for wanted in needed)


def fuse_norms(model: nn.Module) -> int:
    """Replace every RMSNorm of `model` that one of ours equals within the rounding of its dtype; returns how many."""
    replaced = 0
    for name, module in list(model.named_modules()):
        fused = _fused_twin(module)
        if fused is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, fused)
            replaced += 1
    return replaced


def _fused_twin(module: nn.Module) -> nn.Module | None:
    """Our form of a module that is an RMSNorm as transformers writes it, if their results agree."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    inputs = len(signature(module.forward).parameters)
    twins: list[nn.Module] = []
    if inputs == 1:
        twins = [FusedRMSNorm(weight, eps), ZeroCentredRMSNorm(weight, eps)]
    elif inputs == 2:
        twins = [GatedRMSNorm(weight, eps)]
    return next((twin for twin in twins if _agree(module, twin, weight, inputs)), None)


def _agree(module: nn.Module, twin: nn.Module, weight: Tensor, inputs: int) -> bool:
    """Whether both give the same for random numbers, of which they take that many."""
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = [torch.randn(8, len(weight), generator=generator).to(weight.device, weight.dtype) for _ in range(inputs)]
    with torch.no_grad():
        expected, got = module(*numbers).float(), twin(*numbers).float()
    return torch.allclose(got, expected, rtol=4 * torch.finfo(weight.dtype).eps, atol=1e-6)
