"""Connects the layers of a forward pass to the sequences of its row: who attends to whom, and which states continue.

`PackedPlan` serves training and prompts without a cache; the sampler's plan keeps keys, values and states (`sampling/local/`).
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tinsmith.kernels.device import upload
from tinsmith.kernels.dispatch import half_on_gpu
from tinsmith.models.attention import LONG, attend_run, dense_attention, group_runs, varlen_attention
from tinsmith.models.delta_rule import convolve_anew, gated_delta_rule_anew
from tinsmith.models.stable_attention import PackedBlocks


class PassPlan(Protocol):
    """Attention, convolution and delta rule of one forward pass, for layers that know nothing of sequences and caches."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention output [tokens, heads, head_dim] of layer number `layer`.

        query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim], rotary positions already applied. `window` is the
        number of last positions a token sees, itself included; None means all.
        """
        ...

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """SiLU of the causal convolution of a gated delta net: x [tokens, channels], weight [channels, taps] -> [tokens, channels]."""
        ...

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """The gated delta rule (`models/delta_rule.py`): [tokens, value_heads, value_dim].

        query and key [tokens, key_heads, key_dim], value [tokens, value_heads, value_dim], decay (a logarithm) and beta
        [tokens, value_heads].
        """
        ...


class PackedPlan:
    """Each sequence of a packed row begins anew, and reaches no other.

    On CUDA in half precision attention is PyTorch's variable-length kernel, or a faster one if all sequences that train have one length.
    Elsewhere neighbours of equal length are one batch. A `stable` plan, which gives no gradients, computes as `models/stable_attention.py`.
    """

    def __init__(self, lengths: list[int], device: torch.device, dtype: torch.dtype, stable: bool = False) -> None:
        self.runs = group_runs(lengths)
        self.lengths = tuple(lengths)
        self.max_length = max(lengths)
        self.blocks = PackedBlocks(lengths, device) if stable else None
        self.cu_seqlens: Tensor | None = None
        if half_on_gpu(device, dtype):
            self.cu_seqlens = upload(np.cumsum([0, *lengths], dtype=np.int32), device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        if self.blocks is not None:
            return self.blocks.attend(query, key, value, scale, window)
        if self.cu_seqlens is not None:
            if self.is_dense(window):
                return dense_attention(self.runs[0], query, key, value, scale)
            return varlen_attention(query, key, value, self.cu_seqlens, self.max_length, scale, window)
        sizes = [run.count * run.length for run in self.runs]
        # Split, not sliced: backward then joins the gradients of the pieces once, instead of adding up rows of zeros with one piece each.
        pieces = zip(self.runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
        parts = [attend_run(run, q, k, v, scale, window) for run, q, k, v in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def is_dense(self, window: int | None) -> bool:
        """Whether all sequences are of one length that is worth preparing a kernel for: not a prompt's."""
        longest = self.max_length
        return torch.is_grad_enabled() and len(self.runs) == 1 and longest >= LONG and (window is None or window >= longest)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        return convolve_anew(x, weight, self.lengths)

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return gated_delta_rule_anew(query, key, value, decay, beta, self.lengths)
