"""Attention over packed rows: PyTorch's kernels, and the plan of a pass, which says what attends to what."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from tinsmith.kernels.device import upload
from tinsmith.kernels.dispatch import half_on_gpu, on_paged_kernel
from tinsmith.models.delta_rule import convolve_anew, gated_delta_rule_anew

log = logging.getLogger(__name__)

FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
LONG = 512
"""Length from which training sequences of equal length use cuDNN, which builds a kernel for each count and length."""


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

    query [queries, heads, head_dim], key and value [keys, kv_heads, head_dim]. `cu_query` and `cu_key` [sequences + 1]
    int32 say where each begins, and `longest` is the most queries and keys of one of them. The last query of a sequence
    sees all of its keys, or the last `window` of them; the query before it one less, and so on; if not `causal`, every
    query sees every key.

    `varlen_attn` does the same. It does not say that it takes fewer heads of keys and values in torch 2.11, and its
    wrappers in Python take longer than the kernel does for an image.
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
    """Whether the operator computes groups of query heads that share keys and values, forward and backward.

    It is tried out.
    """
    query, key = (torch.zeros(8, heads, head_dim, dtype=dtype, device=device, requires_grad=True) for heads in (2, 1))
    bounds = torch.tensor([0, 8], dtype=torch.int32, device=device)
    try:
        torch.autograd.grad(flash_attention(query, key, key, bounds, bounds, (8, 8), 1.0).sum(), (query, key))
    except RuntimeError as error:
        log.warning(
            "heads of keys and values are repeated for their groups, which costs memory: %s", str(error).splitlines()[0]
        )
        return False
    return True


def dense_attention(run: Run, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """`attend_run` on CUDA with the fastest kernel that takes these tensors: cuDNN's, where it does."""
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        return attend_run(run, query, key, value, scale, None)


def attend_run(run: Run, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention within each sequence of a run: query, key, value [run tokens, heads, head_dim] -> as query."""

    def batched(x: Tensor) -> Tensor:  # [run tokens, heads, head_dim] -> [sequences, heads, length, head_dim]
        return x.reshape(run.count, run.length, *x.shape[1:]).transpose(1, 2)

    mask = None
    if window is not None and window < run.length:
        ones = torch.ones(run.length, run.length, dtype=torch.bool, device=query.device)
        mask = ones.tril() & ones.triu(1 - window)
    out = scaled_dot_product_attention(
        batched(query),
        batched(key),
        batched(value),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2).flatten(0, 1)


# Attention whose result for a token depends on what it sees alone, not on how many others are computed with it.
#
# Every token is a row of its own and reads keys and values from blocks, in chunks of one size that begin with its
# sequence. That takes more time than attention that shares what it reads between tokens.

BLOCK = 16
"""Tokens of a block of a packed row."""

ROWS = 16
"""Rows that PyTorch computes at a time; fewer are filled up."""
CHUNK = 64
"""Tokens of a chunk, in PyTorch; a multiple of the size of a block."""


def stable_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attention output [rows, heads, head_dim] of query [rows, heads, head_dim] to what each row sees.

    keys and values [blocks, block size, kv_heads, head_dim]; `table` [rows, most blocks] names the blocks of each row,
    which sees `lengths` [rows] tokens, or the last `window` of them. Places behind them may hold anything.
    """
    if on_paged_kernel(query):
        from tinsmith.kernels.paged_attention import paged_kernel

        return paged_kernel(query, keys, values, table.int(), lengths.int(), scale, window, most_splits=1)
    return torch.cat(
        [_tile(*tile, keys, values, scale, window) for tile in _tiles(query, table, lengths, keys.shape[1])]
    )[: len(query)]


class PackedBlocks:
    """The sequences of a packed row as `stable_attention` takes them: each begins with a block of its own."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        counts = np.array(lengths)
        blocks = -(-counts // BLOCK)
        firsts = np.cumsum(blocks) - blocks  # the first block of each sequence
        within = np.concatenate([np.arange(length) for length in lengths])
        owner = np.repeat(np.arange(len(counts)), counts)
        # [sequences, most blocks]
        table = firsts[:, np.newaxis] + np.minimum(np.arange(blocks.max()), blocks[:, np.newaxis] - 1)
        self.blocks = int(blocks.sum())
        self.places = upload(firsts[owner] * BLOCK + within, device)
        """[tokens]: where each lies, as block · BLOCK + offset."""
        table_on_device = upload(table.astype(np.int32), device)
        # [tokens, most blocks]. For one long sequence this is a view: a copy would grow with the square of the length.
        whole = len(counts) == 1
        self.table = (
            table_on_device.expand(len(owner), -1) if whole else table_on_device.index_select(0, upload(owner, device))
        )
        self.lengths = upload(within + 1, device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Causal attention; shapes as in `PassPlan.attend`."""
        keys, values = (
            x.new_zeros(self.blocks * BLOCK, *x.shape[1:])
            .index_copy_(0, self.places, x)
            .unflatten(0, (self.blocks, BLOCK))
            for x in (key, value)
        )
        return stable_attention(query, keys, values, self.table, self.lengths, scale, window)


def _tiles(query: Tensor, table: Tensor, lengths: Tensor, block: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, tables and lengths of `ROWS` rows each; the last ones filled up with rows that see nothing."""
    missing_blocks = -table.shape[1] % (CHUNK // block)
    tiles = []
    for q, blocks, ends in zip(query.split(ROWS), table.split(ROWS), lengths.split(ROWS), strict=True):
        missing_rows = ROWS - len(q)
        q = torch.cat([q, q.new_zeros(missing_rows, *q.shape[1:])])
        tiles.append((q, pad(blocks.long(), (0, missing_blocks, 0, missing_rows)), pad(ends.long(), (0, missing_rows))))
    return tiles


def _tile(
    query: Tensor, table: Tensor, lengths: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
) -> Tensor:
    """One tile, chunk by chunk. Chunks that a row does not see change nothing of it, to the last bit."""
    rows, heads, head_dim = query.shape
    block, kv_heads = keys.shape[1:3]
    exact = torch.promote_types(query.dtype, torch.float32)
    q = query.to(exact).view(rows * kv_heads, heads // kv_heads, head_dim) * scale
    highest = q.new_full((*q.shape[:2], 1), -torch.inf)
    total, sums = torch.zeros_like(highest), torch.zeros_like(q)
    ends = lengths[:, None, None]
    for start in range(0, max(1, int(lengths.max())), CHUNK):
        place = start + torch.arange(CHUNK, device=query.device)
        seen = place < ends if window is None else (place < ends) & (place >= ends - window)  # [rows, 1, CHUNK]
        seen = seen.expand(-1, kv_heads, -1).reshape(rows * kv_heads, 1, CHUNK)
        index = table[:, start // block : (start + CHUNK) // block].flatten()
        k, v = (
            memory.index_select(0, index)
            .view(rows, CHUNK, kv_heads, head_dim)
            .transpose(1, 2)
            .reshape(-1, CHUNK, head_dim)
            .to(exact)
            for memory in (keys, values)
        )  # [rows · kv_heads, CHUNK, head_dim]
        scores = torch.where(seen, torch.bmm(q, k.mT), -torch.inf)
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        level = torch.where(higher == -torch.inf, 0.0, higher)
        p, shrink = (scores - level).exp(), (highest - level).exp()
        total = total * shrink + p.sum(-1, keepdim=True)
        sums = sums * shrink + torch.bmm(p, torch.where(seen.mT, v, 0.0))
        highest = higher
    return torch.where(total > 0, sums / total, 0.0).to(query.dtype).view(rows, heads, head_dim)


# Connects the layers of a forward pass to the sequences of its row: who attends to whom, and which states continue.
#
# `PackedPlan` serves training and prompts without a cache; the sampler's plan (`sampling/local/`) keeps keys,
# values and states.


class PassPlan(Protocol):
    """Attention, convolution and delta rule of a forward pass, for layers that know nothing of sequences and caches."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention output [tokens, heads, head_dim] of layer number `layer`.

        query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim], rotary positions already applied.
        `window` is the number of last positions a token sees, itself included; None means all.
        """
        ...

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """The causal convolution of a gated delta net, then SiLU: [tokens, channels].

        x [tokens, channels], weight [channels, taps].
        """
        ...

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """The gated delta rule (`models/delta_rule.py`): [tokens, value_heads, value_dim].

        query and key [tokens, key_heads, key_dim], value [tokens, value_heads, value_dim], decay (a logarithm) and beta
        [tokens, value_heads].
        """
        ...

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        """The experts that compute each token: those that the router chose, `chosen` [tokens, per_token], or others.

        `mixture` is the number of the mixture of experts, counted from the first layer that has one.
        """
        ...


class PackedPlan:
    """Each sequence of a packed row begins anew, and reaches no other.

    On CUDA in half precision attention is PyTorch's variable-length kernel, or a faster one if all sequences that train
    have one length. Elsewhere neighbours of equal length are one batch. A `stable` plan, which gives no gradients,
    computes by `stable_attention`.
    """

    def __init__(
        self,
        lengths: list[int],
        device: torch.device,
        dtype: torch.dtype,
        stable: bool = False,
        routes: Tensor | None = None,
    ) -> None:
        """`routes` [mixtures, tokens, per_token] are the experts to follow, -1 for tokens whose router chooses."""
        self.routes = routes
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
        # Split, not sliced: backward then joins the gradients of the pieces once, instead of adding up rows of zeros
        # with one piece each.
        pieces = zip(self.runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
        parts = [attend_run(run, q, k, v, scale, window) for run, q, k, v in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def is_dense(self, window: int | None) -> bool:
        """Whether all sequences are of one length that is worth preparing a kernel for: not a prompt's."""
        longest = self.max_length
        return (
            torch.is_grad_enabled()
            and len(self.runs) == 1
            and longest >= LONG
            and (window is None or window >= longest)
        )

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        return convolve_anew(x, weight, self.lengths)

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return gated_delta_rule_anew(query, key, value, decay, beta, self.lengths)

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        return chosen if self.routes is None else followed(self.routes[mixture], chosen)


def followed(route: Tensor, chosen: Tensor) -> Tensor:
    """Put the experts to follow [tokens, per_token] in the place of those chosen, but for tokens where they are -1."""
    return torch.where(route < 0, chosen, route.to(chosen.dtype))
