"""Attention over packed rows: PyTorch's kernels below the plan of a pass (`models/pass_plan.py`), which says what attends to what."""

import itertools
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

log = logging.getLogger(__name__)

FASTEST_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LONG = 512
"""Tokens from which sequences of one length are attended to by cuDNN, which prepares a kernel for each number and length of them."""


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences of one length, attended to in one call."""

    count: int
    length: int


def group_runs(lengths: list[int]) -> list[Run]:
    """Neighbouring equal lengths, e.g. [4, 4, 7] -> Run(2, 4), Run(1, 7)."""
    return [Run(len(list(group)), length) for length, group in itertools.groupby(lengths)]


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_query: Tensor,
    cu_key: Tensor,
    longest: tuple[int, int],
    scale: float,
    window: int | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention of sequences that lie one behind the other, with PyTorch's variable-length CUDA kernel.

    query [queries, heads, head_dim], key and value [keys, kv_heads, head_dim]. `cu_query` and `cu_key` [sequences + 1] int32 say where each
    begins, and `longest` is the most queries and keys of one of them. The last query of a sequence sees all of its keys, or the last
    `window` of them; the query before it one less, and so on; if not `causal`, every query sees every key.

    `varlen_attn` does the same. It does not say that it takes fewer heads of keys and values in torch 2.11, and its wrappers in Python take
    longer than the kernel does for an image.
    """
    sees: dict[str, Any] = {"is_causal": causal}
    if window is not None:
        sees = {"is_causal": False, "window_size_left": window - 1, "window_size_right": 0}
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, cu_query, cu_key, *longest, dropout_p=0.0, return_debug_mask=False, scale=scale, **sees
    )[0]
    return out


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Causal attention of whole sequences; shapes as in `PassPlan.attend`."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not _groups_heads(query.dtype, query.shape[2], query.device):
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return flash_attention(query, key, value, cu_seqlens, cu_seqlens, (longest, longest), scale, window)


@cache
@torch.enable_grad()
def _groups_heads(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether the operator computes groups of query heads that share keys and values, forward and backward. It is tried out."""
    query, key = (torch.zeros(8, heads, head_dim, dtype=dtype, device=device, requires_grad=True) for heads in (2, 1))
    bounds = torch.tensor([0, 8], dtype=torch.int32, device=device)
    try:
        torch.autograd.grad(flash_attention(query, key, key, bounds, bounds, (8, 8), 1.0).sum(), (query, key))
    except RuntimeError as error:
        log.warning("heads of keys and values are repeated for their groups, which costs memory: %s", str(error).splitlines()[0])
        return False
    return True


def dense_attention(run: Run, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`attend_run` on CUDA with the fastest kernel that takes these tensors: cuDNN's, where it does."""
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        return attend_run(run, query, key, value, scale, None)


def attend_run(run: Run, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention of the sequences of one run: query, key, value [run tokens, heads, head_dim] -> the shape of query."""

    def batched(x: Tensor) -> Tensor:  # [run tokens, heads, head_dim] -> [sequences, heads, length, head_dim]
        return x.reshape(run.count, run.length, *x.shape[1:]).transpose(1, 2)

    mask = None
    if window is not None and window < run.length:
        ones = torch.ones(run.length, run.length, dtype=torch.bool, device=query.device)
        mask = ones.tril() & ones.triu(1 - window)
    out = scaled_dot_product_attention(
        batched(query), batched(key), batched(value), attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)
