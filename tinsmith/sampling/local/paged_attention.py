"""Attention of one new token of each row to the keys and values that its sequence has in the cache.

On CUDA in half precision a Triton kernel computes it (`paged_kernels.py`). A CUDA graph can capture it: its grid depends on the sizes of
the tensors alone, and each row's length is read on the device. Elsewhere `paged_reference` computes the same in PyTorch.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tinsmith.models.dispatch import on_paged_kernel
from tinsmith.sampling.local.kv_cache import blocks_for
from tinsmith.sampling.prefix import BLOCK


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Attention output [rows, heads, head_dim] of query [rows, heads, head_dim] to what each row has in the cache.

    keys and values [blocks, BLOCK, kv_heads, head_dim] are those of one layer. `table` [rows, most blocks] int32 names the blocks of each
    row in their order, and `lengths` [rows] int32 says how many tokens lie in them, the new one included: its key and value are stored
    already. `window` is the number of last tokens that a row sees; None means all. A row of length 0 gets zeros. Blocks that are not a
    row's own, and places behind its length, may hold anything, NaN included, if the table's entries there name blocks that exist.
    """
    if on_paged_kernel(query):
        from tinsmith.models.paged_kernels import paged_kernel

        return paged_kernel(query, keys, values, table, lengths, scale, window)
    if table.device.type == "cpu":  # reading a length there waits for nothing
        table = table[:, : max(1, blocks_for(int(lengths.max())))]
    return paged_reference(query, keys, values, table, lengths, scale, window)


def store_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`paged_attention` by the kernel, which also stores key and value [rows, kv_heads, head_dim] of the newest token of each row.

    `on_paged_kernel` must say that there is one. No row may read the place where the newest token of another is stored. Several may be
    stored in one place that nobody reads, as in the scratch block.
    """
    from tinsmith.models.paged_kernels import paged_kernel

    return paged_kernel(query, keys, values, table, lengths, scale, window, newest=(key, value))


def paged_reference(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """`paged_attention` in PyTorch, without reading anything on the host. It gathers the whole table."""
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    index = table.flatten().long()
    k, v = (
        memory.index_select(0, index).view(rows, -1, kv_heads, head_dim).transpose(1, 2)  # [rows, kv_heads, table · BLOCK, head_dim]
        for memory in (keys, values)
    )
    places = torch.arange(table.shape[1] * BLOCK, device=table.device)
    seen = places < lengths.unsqueeze(1)
    if window is not None:
        seen &= places >= lengths.unsqueeze(1) - window
    seen = seen[:, None, :]  # [rows, 1, table · BLOCK]
    # Attention multiplies what it masks by 0, and a NaN there would get through.
    k, v = (torch.where(seen.unsqueeze(-1), memory, 0) for memory in (k, v))
    folded = query.view(rows, kv_heads, heads // kv_heads, head_dim)  # heads that share a key/value head are the query rows of one call
    out = scaled_dot_product_attention(folded, k, v, attn_mask=seen.unsqueeze(2), scale=scale).flatten(1, 2)
    return torch.where((lengths > 0)[:, None, None], out, 0)


def gathered_bytes(keys: Tensor, rows: int, blocks: int) -> int:
    """Return the bytes of a call's copies of keys and values like `keys` [blocks, BLOCK, kv_heads, head_dim], `blocks` a row."""
    return 0 if on_paged_kernel(keys) else 2 * rows * blocks * keys[0].nbytes
