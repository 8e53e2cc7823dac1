"""Attention over packed rows, as one function that transformers calls, and the kernels below it.

The language model of every family runs with `attn_implementation=ATTENTION`; the plan of the pass (`models/pass_plan.py`) says what attends
to what. The vision tower is never switched to this function: it would be called without its own `cu_seqlens`.
"""

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from tinsmith.models.pass_plan import PassPlan

ATTENTION = "tinsmith"
"""The name under which the function is registered with transformers."""

HARMLESS = frozenset({"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions"})
"""What transformers passes to an attention function beside what we obey, and that changes no number: the network never trains, so that
dropout is 0, positions are already in query and key, and a plan keeps the cache. Anything else is refused (soft caps, sinks, biases)."""


@dataclass(frozen=True)
class Run:
    """Neighbouring sequences of one length, attended to in one call."""

    count: int
    length: int


def group_runs(lengths: list[int]) -> list[Run]:
    """Neighbouring equal lengths, e.g. [4, 4, 7] -> Run(2, 4), Run(1, 7)."""
    return [Run(len(list(group)), length) for length, group in itertools.groupby(lengths)]


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Causal attention with PyTorch's variable-length CUDA kernel; shapes as in `PassPlan.attend`.

    Key and value heads are repeated for their groups: the kernel of torch 2.11 takes as many of them as query heads.
    """
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None else window - 1
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    out = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=(left, 0))
    assert isinstance(out, Tensor)  # a tuple only if the log-sum-exp is asked for
    return out


def continued_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_query: Tensor, cu_key: Tensor, longest: tuple[int, int], scale: float, window: int | None
) -> Tensor:
    """Causal attention of sequences whose last tokens alone are queries, with PyTorch's variable-length CUDA kernel.

    query [queries, heads, head_dim], key and value [keys, kv_heads, head_dim], the sequences one behind the other. `cu_query` and `cu_key`
    [sequences + 1] int32 say where each begins, and `longest` is the most queries and keys of one of them. The last query of a sequence
    sees all of its keys, or the last `window` of them; the query before it one less, and so on. Heads are not repeated for their groups.
    """
    sees = {"is_causal": True} if window is None else {"is_causal": False, "window_size_left": window - 1, "window_size_right": 0}
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, cu_query, cu_key, *longest, dropout_p=0.0, return_debug_mask=False, scale=scale, **sees
    )[0]
    return out


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


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    plan: "PassPlan",
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
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out = plan.attend(module.layer_idx, q, k, v, scaling, sliding_window)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)
