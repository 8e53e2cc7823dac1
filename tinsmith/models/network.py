"""Makes a transformers network compute packed rows with adapters: attention, norms, linear layers and delta nets.

Models that our own decoder (`models/decoder.py`) does not know run through these modules; of the others they hold the
parameters, and the self-check compares both ways. The plan of a pass (`models/attention.py`) is a keyword that
transformers hands through to each layer.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu, softplus
from transformers import AttentionInterface

from tinsmith.errors import ConfigError
from tinsmith.models.attention import PassPlan
from tinsmith.models.decoder import recomputed
from tinsmith.models.families import Family
from tinsmith.models.full import FullWeights
from tinsmith.models.joined_linear import JoinedLinear, WeightPiece
from tinsmith.models.layout import LoraTarget, Projection
from tinsmith.models.lora import ExpertFactors, Segment, experts_of
from tinsmith.models.packed_lora import SegmentAdapters
from tinsmith.models.quantized import QuantizedParameter

ATTENTION = "tinsmith"
"""The name under which the attention function is registered with transformers."""
HARMLESS = frozenset({"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions"})
"""Arguments that change no result: dropout is 0, and positions are already in query and key. Others are refused."""


# Attention


def use_attention(network: Any, family: Family, implementation: str) -> None:
    """Set the attention function of the language model; a vision tower keeps sdpa, as ours gets no `cu_seqlens`."""
    network.set_attn_implementation(
        {"text_config": implementation, "vision_config": "sdpa"} if family.takes_images else implementation
    )


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    plan: PassPlan,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend for transformers: query [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim].

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


# RMS norms in few kernels: those of transformers take ten, which on a GPU cost as much as a large multiplication.


class _Norm(nn.Module):
    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps


class FusedRMSNorm(_Norm):
    """weight · x / sqrt(mean(x²) + eps) over the last dimension (Zhang and Sennrich, 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class ZeroCentredRMSNorm(FusedRMSNorm):
    """The same with 1 + weight in place of the weight, in float32, and rounded once (Qwen3.5, Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        return _recomputed(self._norm, x, self.weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(dtype), weight.shape, 1 + weight.to(dtype), self.eps).to(x.dtype)


class GatedRMSNorm(_Norm):
    """The plain one times SiLU of a gate of the same shape, in float32, and rounded once (gated delta nets)."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return _recomputed(self._norm, x, gate, self.weight)

    def _norm(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return (rms_norm(x.to(dtype), weight.shape, weight.to(dtype), self.eps) * silu(gate.to(dtype))).to(x.dtype)


def _recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Apply the function, and keep nothing but its inputs for the backward, which computes it again."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    compute: Callable[..., Tensor] = _Recomputed.apply
    return compute(function, *inputs)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(wanted) for x, wanted in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grads))
        return None, *(next(found) if wanted else None for wanted in needed)


def fuse_norms(model: nn.Module) -> int:
    """Replace every RMSNorm that one of ours equals on random inputs, up to rounding, and return how many."""
    replaced = 0
    for name, module in list(model.named_modules()):
        fused = _fused_twin(module)
        if fused is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, fused)
            replaced += 1
    return replaced


def _fused_twin(module: nn.Module) -> nn.Module | None:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    inputs = len(inspect.signature(module.forward).parameters)
    twins: list[nn.Module] = []
    if inputs == 1:
        twins = [FusedRMSNorm(weight, eps), ZeroCentredRMSNorm(weight, eps)]
    elif inputs == 2:
        twins = [GatedRMSNorm(weight, eps)]
    return next((twin for twin in twins if _agree(module, twin, weight, inputs)), None)


def _agree(module: nn.Module, twin: nn.Module, weight: Tensor, inputs: int) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = [torch.randn(8, len(weight), generator=generator).to(weight.device, weight.dtype) for _ in range(inputs)]
    with torch.no_grad():
        expected, got = module(*numbers).float(), twin(*numbers).float()
    return torch.allclose(got, expected, rtol=4 * torch.finfo(weight.dtype).eps, atol=1e-6)


# Gated delta nets (Qwen3.5), so that packed sequences do not mix


def follow_plans(language_model: nn.Module) -> None:
    """Let every gated delta net follow the plan of its pass; without a plan it runs transformers' PyTorch code."""
    for module in language_model.modules():
        if hasattr(module, "in_proj_qkv") and hasattr(module, "A_log"):
            module.forward = partial(_forward, module)


def _forward(
    module: Any, hidden_states: Tensor, *arguments: Any, plan: PassPlan | None = None, **keywords: Any
) -> Tensor:
    """Compute a gated delta net for transformers: hidden_states [1, tokens, hidden] -> [1, tokens, hidden]."""
    if plan is None:
        with _plain_pytorch(type(module)):
            output: Tensor = type(module).forward(module, hidden_states, *arguments, **keywords)
        return output
    tokens = hidden_states.shape[1]
    # [tokens, channels]
    mixed = plan.convolve(module.layer_idx, module.in_proj_qkv(hidden_states)[0], module.conv1d.weight.squeeze(1))
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

    Where flash-linear-attention is installed it always uses those kernels: on the CPU, where they fail, and in float32,
    where they are less exact than what is compared with them.
    """
    functions = vars(sys.modules[layer.__module__])
    kept = {
        name: functions[name]
        for name in inspect.unwrap(layer.forward).__code__.co_names
        if inspect.isfunction(functions.get(name))
    }
    functions.update({name: inspect.unwrap(function) for name, function in kept.items()})
    try:
        yield
    finally:
        functions.update(kept)


# LoRA and recomputation, for the pass that is running


class ActivePass:
    """State of the running pass for modules, which transformers calls with their input alone."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.recompute = 0
        """Number of first layers that are computed again in the backward."""
        self.full: FullWeights | None = None

    @contextmanager
    def during(self, segments: list[Segment], recompute: int = 0, full: FullWeights | None = None) -> Iterator[None]:
        """Set them while the body runs. Afterwards they are what they were: no adapter is kept alive by them."""
        before = self.segments, self.recompute, self.full
        self.segments, self.recompute, self.full = segments, recompute, full
        try:
            yield
        finally:
            self.segments, self.recompute, self.full = before


class LoraLinear(nn.Module):
    """A linear layer plus, on each segment of the row, that segment's adapter.

    It keeps the parameters of the layer that it replaces.
    """

    def __init__(self, name: str, base: nn.Linear, targets: Mapping[str, LoraTarget], active: ActivePass) -> None:
        """`targets` are what adapters cover of the layer, by name."""
        super().__init__()
        self.weight = base.weight
        self.bias: nn.Parameter | None = base.bias
        self.rows = (0, base.out_features)
        own = {target_name: target.rows or self.rows for target_name, target in targets.items()}
        self.projection = Projection(name, (name,), own, base.in_features, base.out_features)
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        """Map x [1, tokens, in_features], or in OPT [tokens, in_features], to as many outputs."""
        # Made anew each time: full-parameter training puts another weight in the place of this one for a pass.
        linear = JoinedLinear(self.projection, (self.rows,), (WeightPiece(self.rows, self.weight, self.bias),))
        y = SegmentAdapters(self.active.segments).apply(linear, x.flatten(0, -2))
        return y.view(*x.shape[:-1], -1)


def attach_lora(model: nn.Module, targets: Mapping[str, LoraTarget], active: ActivePass) -> None:
    """Replace the linear layers that these targets are, or are parts of, by ones with LoRA."""
    linears = {name: target for name, target in targets.items() if not target.experts}
    for module, own in groupby(linears.items(), key=lambda item: item[1].module):
        parent, _, child = module.rpartition(".")
        linear: Any = model.get_submodule(module)
        setattr(model.get_submodule(parent), child, LoraLinear(module, linear, dict(own), active))


def attach_to_experts(language_model: nn.Module, layers: Iterable[int], active: ActivePass) -> None:
    """Let the mixtures of experts of these layers compute each segment with its adapter."""
    for index in layers:
        name = f"layers.{index}.mlp.experts"
        module: Any = language_model.get_submodule(name)
        module.forward = partial(_forward_experts, module, name, active)


def _forward_experts(
    module: Any, name: str, active: ActivePass, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Compute segment after segment by transformers' own code, each with weights that its adapter is merged into."""
    found = []
    quantized = {part: own for part, own in module.named_children() if isinstance(own, QuantizedParameter)}
    if quantized:
        module = _with_parameters(module, {part: own.matrices.copied() for part, own in quantized.items()})
    for segment in active.segments or [Segment(0, len(hidden), None)]:
        own = slice(segment.start, segment.end)
        factors = None if segment.adapter is None else experts_of(segment.adapter, name)
        merged = module
        if segment.adapter is not None and factors is not None:
            merged = _with_parameters(module, _merged(module, factors, segment.adapter.scale))
        found.append(type(module).forward(merged, hidden[own], chosen[own], weights[own]))
    return torch.cat(found)


def _merged(module: Any, factors: ExpertFactors, scale: float) -> dict[str, Tensor]:
    gate, up, down = (scale * pair.b @ pair.a for pair in factors)  # [experts, out, in]
    return {"gate_up_proj": module.gate_up_proj + torch.cat([gate, up], 1), "down_proj": module.down_proj + down}


def _with_parameters(module: nn.Module, parameters: dict[str, Tensor]) -> nn.Module:
    """A module that differs in these parameters, which may be no leaves of the graph."""
    other = copy(module)
    other.__dict__["_parameters"] = {**module._parameters, **parameters}
    return other


def recompute_layers(language_model: nn.Module, active: ActivePass) -> None:
    """Let a pass have its first layers recomputed (`models/decoder.py`)."""
    prefix, layers = layer_modules(language_model)
    for index, layer in enumerate(layers):
        own: Any = layer
        own.forward = partial(_forward_layer, own, own.forward, index, f"{prefix}.{index}.", active)


def _forward_layer(
    layer: Any,
    forward: Callable[..., Any],
    index: int,
    prefix: str,
    active: ActivePass,
    hidden: Tensor,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    """Replace the layer's own `forward`."""
    if index >= active.recompute or not torch.is_grad_enabled():
        return forward(hidden, *arguments, **keywords)
    segments, full = active.segments, active.full

    def compute(x: Tensor, **keywords: Any) -> Any:
        # The backward comes when the pass has ended. Inside nothing is recomputed: this function calls the layer.
        with active.during(segments):
            if full is None:
                return layer(x, *arguments, **keywords)
            return full.call(layer, prefix, x, *arguments, **keywords)

    return recomputed(compute, hidden, **keywords)


def layer_modules(language_model: Any) -> tuple[str, Sequence[nn.Module]]:
    """The name of the list of a language model's decoder layers, and the layers; both empty if it has no such list."""
    for name, module in language_model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == language_model.config.num_hidden_layers:
            return name, list(module)
    return "", []
