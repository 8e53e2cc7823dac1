"""Gated delta nets (Qwen3.5): our way through the layer that transformers has built, so that packed sequences do not mix.

transformers' layer keeps its parameters. With a plan (`models/pass_plan.py`) the layer asks that plan for its convolution and its
delta rule, as attention layers do; without one it computes as transformers does in PyTorch, which is what the self-check compares
with.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from tinsmith.models.pass_plan import PassPlan


def follow_plans(language_model: nn.Module) -> None:
    """Let every gated delta net of the language model follow the plan of its pass."""
    for module in language_model.modules():
        if hasattr(module, "in_proj_qkv") and hasattr(module, "A_log"):
            module.forward = partial(_forward, module)


def _forward(module: Any, hidden_states: Tensor, *arguments: Any, plan: PassPlan | None = None, **keywords: Any) -> Tensor:
    """Compute a gated delta net for transformers: hidden_states [1, tokens, hidden] -> [1, tokens, hidden]."""
    if plan is None:
        with _plain_pytorch(type(module)):
            output: Tensor = type(module).forward(module, hidden_states, *arguments, **keywords)
        return output
    tokens = hidden_states.shape[1]
    mixed = plan.convolve(module.layer_idx, module.in_proj_qkv(hidden_states)[0], module.conv1d.weight.squeeze(1))  # [tokens, channels]
    query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    beta = module.in_proj_b(hidden_states)[0].sigmoid()  # [tokens, value_heads]
    a = module.in_proj_a(hidden_states)[0]
    exact = torch.promote_types(a.dtype, torch.float32)
    decay = -module.A_log.to(exact).exp() * softplus(a.to(exact) + module.dt_bias)
    out = plan.delta_rule(
        module.layer_idx,
        query.view(tokens, module.num_k_heads, module.head_k_dim),
        key.view(tokens, module.num_k_heads, module.head_k_dim),
        value.view(tokens, module.num_v_heads, module.head_v_dim),
        decay,
        beta,
    )  # [tokens, value_heads, value_dim]
    gate = module.in_proj_z(hidden_states)[0].view(-1, module.head_v_dim)
    normed = module.norm(out.reshape(-1, module.head_v_dim), gate)  # [tokens · value_heads, value_dim]
    result: Tensor = module.out_proj(normed.view(1, tokens, -1))
    return result


@contextmanager
def _plain_pytorch(layer: type[nn.Module]) -> Iterator[None]:
    """Let a layer of transformers compute with what transformers has written itself.

    Where flash-linear-attention is installed, transformers decides at its import to use those kernels always: also for tensors on the CPU,
    where they fail, and in float32, where they are less exact than what is compared with them.
    """
    functions = vars(sys.modules[layer.__module__])
    kept = {name: functions[name] for name in inspect.unwrap(layer.forward).__code__.co_names if inspect.isfunction(functions.get(name))}
    functions.update({name: inspect.unwrap(function) for name, function in kept.items()})
    try:
        yield
    finally:
        functions.update(kept)
