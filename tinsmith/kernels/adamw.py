"""AdamW's step of one tensor of full weights in one Triton kernel, which also writes the copy that passes read.

PyTorch's fused AdamW takes gradients in float32 only, and leaves the working copy to another kernel. Here each number
is read and written once, as it lies in memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.kernels.adamw_formula import Factors, step_as_written

BLOCK = 2048
"""Numbers that a program computes."""


@torch.no_grad()
def step(master: Tensor, gradient: Tensor, first: Tensor, second: Tensor, working: Tensor, factors: Factors) -> None:
    """Update a master, its moments (all float32) and its working copy in place; all tensors have one shape.

    `gradient` and `working` may be of any precision. Tensors that are not contiguous are computed by `step_as_written`.
    """
    tensors = (master, gradient, first, second, working)
    if not all(tensor.is_contiguous() for tensor in tensors):
        step_as_written(master, gradient, first, second, factors)
        working.copy_(master)
        return
    launch: Any = _step
    f = factors
    numbers = (f.scale, f.beta1, f.beta2, 1 - f.beta1, 1 - f.beta2, f.decay, f.rate, f.root, f.eps)
    launch[(triton.cdiv(master.numel(), BLOCK),)](*tensors, master.numel(), *numbers, BLOCK=BLOCK, num_warps=8)


@triton.jit
def _step(
    master_at: tl.tensor,
    gradient_at: tl.tensor,
    first_at: tl.tensor,
    second_at: tl.tensor,
    working_at: tl.tensor,
    count: tl.tensor,
    scale: tl.tensor,
    beta1: tl.tensor,
    beta2: tl.tensor,
    rest1: tl.tensor,
    rest2: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    root: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gradient_at + at, mask=inside, other=0.0).to(tl.float32) * scale
    m = tl.load(first_at + at, mask=inside, other=0.0) * beta1 + g * rest1
    v = tl.load(second_at + at, mask=inside, other=0.0) * beta2 + g * rest2 * g
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
    w = tl.load(master_at + at, mask=inside, other=0.0) * decay - tl.div_rn(m * rate, denominator)
    tl.store(first_at + at, m, mask=inside)
    tl.store(second_at + at, v, mask=inside)
    tl.store(master_at + at, w, mask=inside)
    tl.store(working_at + at, w.to(working_at.dtype.element_ty), mask=inside)
