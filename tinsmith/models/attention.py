"""Attention over packed rows, as one function that transformers calls and a plan that says what it should do.

The language model of every family runs with `attn_implementation=ATTENTION`; its caller passes `attention=<plan>` as a keyword, which
transformers hands through to each layer. `PackedPlan` (here) serves training and prompts without a cache; the sampler's plans keep a cache
(`sampling/kv_cache.py`). The vision tower is never switched to this function: it would be called without its own `cu_seqlens`.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tinsmith.errors import ConfigError

ATTENTION = "tinsmith"
"""The name under which the function is registered with transformers."""

HARMLESS = frozenset({"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions"})
"""What transformers passes to an attention function beside what we obey, and that changes no number: the network never trains, so that
dropout is 0, positions are already in query and key, and a plan keeps the cache. Anything else is refused (soft caps, sinks, biases)."""


class AttentionPlan(Protocol):
    """How the rows of one forward pass attend to each other and to what is cached."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention output [tokens, heads, head_dim] of layer number `layer`.

        query [heads, tokens, head_dim], key and value [kv_heads, tokens, head_dim], rotary positions already applied. `window` is the
        number of last positions a token sees, itself included; None means all.
        """
        ...


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences of one length, attended to in one call."""

    count: int
    length: int


class PackedPlan:
    """Causal attention inside each sequence of a packed row.

    On CUDA in half precision this is PyTorch's variable-length kernel. Elsewhere neighbouring sequences of equal length go
    through scaled_dot_product_attention as one batch; the numbers are the same.
    """

    def __init__(self, lengths: list[int], device: torch.device, dtype: torch.dtype) -> None:
        self.runs = group_runs(lengths)
        self.max_length = max(lengths)
        self.cu_seqlens: Tensor | None = None
        if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
            self.cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        if self.cu_seqlens is not None:
            return varlen_attention(query, key, value, self.cu_seqlens, self.max_length, scale, window)
        sizes = [run.count * run.length for run in self.runs]
        # Split, not sliced: backward then joins the gradients of the pieces once, instead of adding up rows of zeros with one piece each.
        pieces = zip(self.runs, query.split(sizes, dim=1), key.split(sizes, dim=1), value.split(sizes, dim=1), strict=True)
        parts = [attend_run(run, q, k, v, scale, window) for run, q, k, v in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def group_runs(lengths: list[int]) -> list[Run]:
    """Neighbouring equal lengths, e.g. [4, 4, 7] -> Run(2, 4), Run(1, 7)."""
    return [Run(len(list(group)), length) for length, group in itertools.groupby(lengths)]


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Causal attention with PyTorch's variable-length CUDA kernel; shapes as in `AttentionPlan.attend`.

    Key and value heads are repeated for their groups: the kernel of torch 2.11 takes as many of them as query heads.
    """
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None else window - 1
    groups = query.shape[0] // key.shape[0]
    q, k, v = (x.transpose(0, 1) for x in (query, key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)))
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=(left, 0))
    assert isinstance(out, Tensor)  # a tuple only if the log-sum-exp is asked for
    return out


def attend_run(run: Run, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention of the sequences of one run: query, key, value [heads, run tokens, head_dim] -> [run tokens, heads, head_dim]."""

    def batched(x: Tensor) -> Tensor:  # [heads, run tokens, head_dim] -> [sequences, heads, length, head_dim]
        return x.view(x.shape[0], run.count, run.length, x.shape[2]).transpose(0, 1)

    mask = None
    if window is not None and window < run.length:
        ones = torch.ones(run.length, run.length, dtype=torch.bool, device=query.device)
        mask = ones.tril() & ones.triu(1 - window)
    out = scaled_dot_product_attention(
        batched(query), batched(key), batched(value), attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attention: AttentionPlan,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim].

    Raises ConfigError for an argument that we would have to obey and cannot.
    """
    if attention_mask is not None or others.get("is_causal") is False:
        raise ConfigError("its attention brings a mask of its own; Tinsmith computes causal attention only")
    unknown = [name for name, value in others.items() if name not in HARMLESS and value is not None]
    if unknown:
        raise ConfigError(f"its attention needs what Tinsmith does not compute: {', '.join(unknown)}")
    out = attention.attend(module.layer_idx, query[0], key[0], value[0], scaling, sliding_window)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)
