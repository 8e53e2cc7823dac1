"""One token of each row through a gated delta net, on the states in their slots: both operations read a state once and write it once.

They are those of `models/delta_rule.py`. Which slot is a row's is read on the device, so that a CUDA graph can capture them. On CUDA Triton
kernels compute them (`delta_step_kernels.py`), elsewhere the references, which say what the kernels compute. The states change at once: a
step that is computed again must begin with another state. Rows that nobody waits for may share a slot, which then holds anything.
"""

import torch
from torch import Tensor

from tinsmith.models.delta_rule import convolve, gated_delta_rule
from tinsmith.models.dispatch import HALF, has_triton


def convolve_step(x: Tensor, weight: Tensor, inputs: Tensor, slots: Tensor) -> Tensor:
    """The convolution of one new input of each row, then SiLU: x [rows, channels], weight [channels, taps] -> [rows, channels].

    inputs [slots, taps - 1, channels] are the last ones of every slot, in place; `slots` [rows] says which is whose.
    """
    if _has_kernel(x):
        from tinsmith.sampling.local.delta_step_kernels import convolve_kernel

        return convolve_kernel(x, weight, inputs, slots)
    return convolve_step_reference(x, weight, inputs, slots)


def convolve_step_reference(x: Tensor, weight: Tensor, inputs: Tensor, slots: Tensor) -> Tensor:
    """`convolve_step` in PyTorch."""
    index = slots.long()
    out, after = convolve(x, weight, (1,) * len(x), inputs.index_select(0, index))
    inputs.index_copy_(0, index, after.to(inputs.dtype))
    return out


def delta_step(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, slots: Tensor) -> Tensor:
    """The gated delta rule for one token of each row: [rows, value_heads, value_dim].

    query and key [rows, key_heads, key_dim], value [rows, value_heads, value_dim], decay (a logarithm) and beta [rows, value_heads]. memory
    [slots, value_heads, key_dim, value_dim] float32 holds the states of every slot, in place; `slots` [rows] says which is whose.
    """
    if _has_kernel(query):
        from tinsmith.sampling.local.delta_step_kernels import delta_kernel

        return delta_kernel(query, key, value, decay, beta, memory, slots)
    return delta_step_reference(query, key, value, decay, beta, memory, slots)


def delta_step_reference(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, slots: Tensor) -> Tensor:
    """`delta_step` in PyTorch."""
    index = slots.long()
    out, after = gated_delta_rule(query, key, value, decay, beta, (1,) * len(query), memory.index_select(0, index))
    memory.index_copy_(0, index, after.to(memory.dtype))
    return out


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (*HALF, torch.float32) and has_triton()
