"""flash-linear-attention's kernels for gated delta nets: whether they can be used, and how they are called.

They serve half precision on CUDA. float32 is computed by our own code, as their products of float32 are less exact. flash-linear-attention
refuses Triton 3.4 to 3.7.0 on Hopper GPUs, where its gradients would be wrong; then our own code serves half precision too.
"""

import logging
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.models.device import upload

INSTALL = "pip install 'tinsmith[fast-delta-nets]'"

log = logging.getLogger(__name__)


class DeltaKernels:
    """The kernels, called as `models/delta_rule.py` calls its own functions."""

    def __init__(self) -> None:
        """Raises ImportError where flash-linear-attention or Triton is not installed."""
        rule = import_module("fla.ops.gated_delta_rule")
        self._chunks: Any = rule.chunk_gated_delta_rule
        self._steps: Any = rule.fused_recurrent_gated_delta_rule
        self._convolve: Any = import_module("fla.modules.causal_conv1d").causal_conv1d

    def convolve(self, x: Tensor, weight: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """`convolve` of sequences that begin here: [tokens, channels]."""
        bounds, on_cpu = _bounds(lengths, x.device)
        out: Tensor = self._convolve(x.unsqueeze(0), weight, activation="silu", cu_seqlens=bounds, cu_seqlens_cpu=on_cpu)[0]
        return out[0]

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        lengths: tuple[int, ...],
        before: Tensor | None,
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        """`gated_delta_rule`; the states are only computed if `keeps`."""
        bounds, on_cpu = _bounds(lengths, value.device)
        out, after = self._chunks(
            *(x.unsqueeze(0) for x in (query, key, value, decay, beta)),
            initial_state=before,
            output_final_state=keeps,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds,
            cu_seqlens_cpu=on_cpu,
        )
        return out[0], after

    def step(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """One token of each sequence, without gradients."""
        out, after = self._steps(
            *(x.unsqueeze(1) for x in (query, key, value)),
            g=decay.unsqueeze(1),
            beta=beta.unsqueeze(1),
            initial_state=before,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out[:, 0], after


@lru_cache(maxsize=16)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """`cu_seqlens` [sequences + 1] int64, on the device and on the CPU. The layers of a pass share them."""
    bounds = np.cumsum([0, *lengths])
    return upload(bounds, device), torch.from_numpy(bounds)


def kernels_for(x: Tensor) -> DeltaKernels | None:
    """The kernels, if they serve tensors like `x`."""
    return _load()[0] if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) else None


def announce(device: torch.device, dtype: torch.dtype) -> None:
    """Log once what computes the gated delta nets of a model, and how to get what is faster."""
    if device.type != "cuda":
        return
    if dtype not in (torch.bfloat16, torch.float16):
        log.info("gated delta nets run on our own PyTorch code: flash-linear-attention serves bfloat16, not %s", dtype)
        return
    kernels, obstacle = _load()
    if kernels is None:
        log.warning("gated delta nets run on our own PyTorch code, which is slower than flash-linear-attention: %s", obstacle)
    else:
        log.info("gated delta nets run on the kernels of flash-linear-attention")


@cache
def _load() -> tuple[DeltaKernels | None, str]:
    """The kernels, or None and why they cannot be used."""
    try:
        kernels = DeltaKernels()
        utils = import_module("fla.utils")
    except ImportError as error:
        return None, f"it is not installed ({error}); {INSTALL}"
    if utils.IS_NVIDIA_HOPPER and utils.TRITON_ABOVE_3_4_0 and not utils.TRITON_ABOVE_3_7_1:
        version = import_module("triton").__version__
        return None, f"it refuses Triton {version} on this GPU, where it would compute wrong gradients; PyTorch 2.13 brings Triton 3.7.1"
    return kernels, ""
