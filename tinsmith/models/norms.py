"""RMS normalisation in one kernel. transformers spells it out in ten, which on a GPU cost as much time as a large multiplication.

Only modules that compute exactly this are replaced: each is tried on random numbers first, so a family that normalises differently
(Gemma multiplies by 1 + weight) keeps its own.
"""

from inspect import signature

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


class FusedRMSNorm(nn.Module):
    """weight · x / sqrt(mean(x²) + eps) over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., hidden]."""
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


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
    if (
        not isinstance(weight, nn.Parameter)
        or weight.ndim != 1
        or not isinstance(eps, float)
        or len(signature(module.forward).parameters) != 1
    ):
        return None  # what takes more than its input computes more, such as the gated norm of Qwen3.5
    fused = FusedRMSNorm(weight, eps)
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(8, len(weight), generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad():
        expected, got = module(x).float(), fused(x).float()
    close = torch.allclose(got, expected, rtol=4 * torch.finfo(weight.dtype).eps, atol=1e-6)
    return fused if close else None
