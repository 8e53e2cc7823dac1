"""Triton kernels of the softmax over a vocabulary: `training/logprobs.py` says what each computes.

A row has hundreds of thousands of logits, which are read once and never held as float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Logits of a row that a program takes at a time."""


def logit_norms(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row [rows, 1], and the logarithm of the sum of all exp(logit - largest), in float32."""
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    peaks, totals = (torch.empty(rows, 1, dtype=torch.float32, device=logits.device) for _ in range(2))
    launch: Any = _logit_norms
    launch[(rows,)](logits, logits.stride(0), vocabulary, peaks, totals, BLOCK=BLOCK, num_warps=8)
    return peaks, totals


def become_gradient(logits: Tensor, peak: Tensor, total: Tensor, target: Tensor, grad: Tensor) -> None:
    """Replace logits [rows, vocabulary] by grad · (onehot(target) - softmax), and by 0 where grad is 0.

    All else is [rows, 1].
    """
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    target, grad = target.contiguous(), grad.contiguous()
    launch: Any = _become_gradient
    launch[(rows, triton.cdiv(vocabulary, BLOCK))](
        logits, logits.stride(0), vocabulary, peak, total, target, grad, BLOCK=BLOCK, num_warps=8
    )


@triton.jit
def _logit_norms(
    logits: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One row: the sum is scaled anew whenever a larger logit comes (Milakov and Gimelshein, arXiv 1805.02867)."""
    row = tl.program_id(0)
    peak, total = -3.4028234663852886e38, 0.0  # the lowest, and finite: the difference of two infinities is no number
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        wide = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < vocabulary, other=float("-inf")).to(
            tl.float32
        )
        largest = tl.maximum(peak, tl.max(wide, 0))
        total = total * tl.exp(peak - largest) + tl.sum(tl.exp(wide - largest), 0)
        peak = largest
    tl.store(peaks + row, peak)
    tl.store(totals + row, tl.log(total))


@triton.jit(do_not_specialize=["targets", "grads"])  # parts of longer tensors, wherever they begin
def _become_gradient(
    logits: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    targets: tl.tensor,
    grads: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row.to(tl.int64) * stride + column
    wide = tl.load(place, mask=column < vocabulary, other=0.0).to(tl.float32)
    grad = tl.load(grads + row)
    probability = tl.exp(wide - tl.load(peaks + row) - tl.load(totals + row))
    dz = (tl.where(column == tl.load(targets + row), 1.0, 0.0) - probability) * grad
    tl.store(place, tl.where(grad == 0.0, 0.0, dz).to(logits.dtype.element_ty), mask=column < vocabulary)
