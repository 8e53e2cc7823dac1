"""Takes a transformers model apart into a `Decoder`, if its structure is exactly what `models/decoder.py` computes.

A model of another type, or with an unknown module or activation, runs through its transformers modules.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tinsmith.models.decoder import (
    AttentionBlock,
    Decoder,
    DeltaBlock,
    DenseMLP,
    ExpertMLP,
    Layer,
    Norm,
    Rope,
    SharedExpert,
    head_weights,
)
from tinsmith.models.experts import ExpertStack
from tinsmith.models.files import EXPERT_MODELS
from tinsmith.models.fused import GatedNormed, Heads, Normed
from tinsmith.models.joined_linear import JoinedLinear, join_linears
from tinsmith.models.layers import Attention, DeltaNet, Experts
from tinsmith.models.layout import Layout, is_silu
from tinsmith.models.network import FusedRMSNorm, GatedRMSNorm, ZeroCentredRMSNorm

log = logging.getLogger(__name__)

KNOWN_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_text"),
    *EXPERT_MODELS,
)
"""Model types that `Decoder` computes: the structure alone does not tell which dimensions of a head rotate together."""
INTERLEAVED = ("qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe")
"""Model types that interleave the rotary pairs of time, height and width; others give each axis a contiguous range."""


class _UnknownStructureError(Exception):
    """Something of the model is none of what this module computes."""


def read_decoder(model_type: str, language_model: nn.Module, layout: Layout) -> Decoder | None:
    """The decoder of a loaded language model; None, with nothing changed, if the structure is another.

    Call it when norms are fused and before LoRA is attached. The weights of the linears are joined.
    """
    parts = read_parts(model_type, language_model, layout)
    if parts is None:
        return None
    joined = join_linears(language_model, layout)
    return Decoder(tuple(build(joined) for build in parts.layers), parts.last_norm, parts.rope)


Build = Callable[[Mapping[str, JoinedLinear]], Any]
"""Makes a part of the decoder of the joined linears, when all of the model is known to fit."""


@dataclass(frozen=True, eq=False)
class DecoderParts:
    """Parts from which a decoder is built."""

    layers: Sequence[Build]
    last_norm: Norm
    rope: Rope


def read_parts(model_type: str, language_model: nn.Module, layout: Layout) -> DecoderParts | None:
    """Read the parts of a decoder whose linears are still to be joined.

    Changes nothing, and returns None as `read_decoder` does.
    """
    if model_type not in KNOWN_TYPES:
        return None
    try:
        return _parts_of(model_type, language_model, layout)
    except _UnknownStructureError as error:
        log.warning(
            "%s runs through its transformers modules, which is slower than our own decoder: %s", model_type, error
        )
        return None


def _parts_of(model_type: str, language_model: Any, layout: Layout) -> DecoderParts:
    _require_children(language_model, "embed_tokens", "layers", "norm", "rotary_emb")
    rope = _read_rope(model_type, language_model)
    last_norm = _read_norm(language_model, "norm")
    layers = [_read_layer(model_type, language_model, index, layout) for index in range(len(layout.layers))]
    if len(language_model.layers) != len(layers):
        raise _UnknownStructureError(
            f"it has {len(language_model.layers)} layers, its configuration says {len(layers)}"
        )
    return DecoderParts(layers, last_norm, rope)


def _read_rope(model_type: str, language_model: Any) -> Rope:
    rotary = language_model.rotary_emb
    frequencies = rotary.inv_freq.float()
    sections = getattr(rotary, "mrope_section", None)
    if model_type == "qwen3_5_text" or sections is None:
        return Rope(frequencies, float(rotary.attention_scaling), None)
    pairs = len(frequencies)
    if model_type in INTERLEAVED:
        axes = torch.zeros(pairs, dtype=torch.int64)
        for row in (1, 2):
            axes[row : 3 * sections[row] : 3] = row
    else:
        axes = torch.tensor([row % 3 for row, count in enumerate(sections) for _ in range(count)])
    if len(axes) != pairs:
        raise _UnknownStructureError(f"mrope_section={sections} does not divide its {pairs} rotary pairs")
    return Rope(frequencies, float(rotary.attention_scaling), axes.to(frequencies.device))


def _read_layer(model_type: str, language_model: Any, index: int, layout: Layout) -> Build:
    name, kind = f"layers.{index}", layout.layers[index]
    layer = language_model.get_submodule(name)
    attends = isinstance(kind, Attention)
    _require_children(
        layer, "self_attn" if attends else "linear_attn", "mlp", "input_layernorm", "post_attention_layernorm"
    )
    mlp: Build
    if (experts := layout.experts.get(index)) is None:
        mlp = _read_dense(language_model, f"{name}.mlp", layout)
    else:
        mlp = _read_experts(language_model, index, layout, experts)
    first, second = (
        _read_norm(language_model, f"{name}.{norm}") for norm in ("input_layernorm", "post_attention_layernorm")
    )
    if isinstance(kind, Attention):
        block = _read_attention(model_type, language_model, index, kind)
    else:
        block = _read_delta_net(language_model, index, kind)
    return lambda joined: Layer(block(joined), first, second, mlp(joined))


def _read_dense(language_model: Any, name: str, layout: Layout) -> Build:
    module = language_model.get_submodule(name)
    _require_children(module, "gate_proj", "up_proj", "down_proj", "act_fn")
    if not is_silu(module.act_fn):
        raise _UnknownStructureError(f"{name} has the activation {module.act_fn}")
    if not {f"{name}.gate_up", f"{name}.down_proj"} <= layout.projections.keys():
        raise _UnknownStructureError(f"the linears of {name} are not those of its layout")
    return lambda joined: DenseMLP(joined[f"{name}.gate_up"], joined[f"{name}.down_proj"])


def _read_experts(language_model: Any, index: int, layout: Layout, kind: Experts) -> Build:
    name, number = f"layers.{index}.mlp", list(layout.experts).index(index)
    module = language_model.get_submodule(name)
    names = (f"{name}.gate.weight", f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj")
    router, gate_up, down = (language_model.get_parameter(parameter) for parameter in names)
    stack = ExpertStack(f"{name}.experts", kind, names, router, gate_up, down)
    if not kind.shared_width:
        _require_children(module, "gate", "experts")
        return lambda joined: ExpertMLP(number, stack, None)
    _require_children(module, "gate", "experts", "shared_expert", "shared_expert_gate")
    dense, gate = _read_dense(language_model, f"{name}.shared_expert", layout), f"{name}.shared_expert_gate"
    return lambda joined: ExpertMLP(number, stack, SharedExpert(dense(joined), joined[gate]))


def _read_attention(model_type: str, language_model: Any, index: int, kind: Attention) -> Build:
    name = f"layers.{index}.self_attn"
    module = language_model.get_submodule(name)
    children = {child for child, _ in module.named_children()}
    linears = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if children not in (linears, linears | {"q_norm", "k_norm"}):
        raise _UnknownStructureError(f"{name} consists of {', '.join(sorted(children))}")
    norms = (
        (_read_norm(language_model, f"{name}.q_norm"), _read_norm(language_model, f"{name}.k_norm"))
        if "q_norm" in children
        else None
    )
    heads, rest = divmod(module.o_proj.weight.shape[1], kind.head_dim)
    gated = model_type.startswith("qwen3_5")
    widths = (heads * kind.head_dim * (2 if gated else 1), kind.kv_heads * kind.head_dim, kind.kv_heads * kind.head_dim)
    if rest or tuple(len(getattr(module, f"{part}_proj").weight) for part in "qkv") != widths:
        raise _UnknownStructureError(f"queries, keys and values of {name} do not have {widths} outputs")
    if norms is not None and (
        norms[0].kind != norms[1].kind or any(norm.weight.shape != (kind.head_dim,) for norm in norms)
    ):
        raise _UnknownStructureError(
            f"the norms of queries and keys of {name} differ, or are not those of single heads"
        )
    norm_kind = norms[0].kind if norms else Normed(0.0, False)
    shape = Heads(heads, kind.kv_heads, kind.head_dim, gated, norm_kind.eps, norm_kind.zero_centred)
    # Mistral's attention reads its window from the configuration; the others that have one keep it themselves.
    window_of = module if hasattr(module, "sliding_window") else module.config if model_type == "mistral" else None
    return lambda joined: AttentionBlock(
        index,
        joined[f"{name}.qkv"],
        joined[f"{name}.o_proj"],
        shape,
        norms,
        head_weights(norms, shape),
        float(module.scaling),
        window_of,
    )


def _read_delta_net(language_model: Any, index: int, kind: DeltaNet) -> Build:
    name = f"layers.{index}.linear_attn"
    module = language_model.get_submodule(name)
    _require_children(module, "conv1d", "norm", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    if (
        not isinstance(module.norm, GatedRMSNorm)
        or module.conv1d.bias is not None
        or module.activation not in ("silu", "swish")
    ):
        raise _UnknownStructureError(f"{name} has another norm, convolution or activation")
    names = tuple(f"{name}.{parameter}" for parameter in ("norm.weight", "conv1d.weight", "A_log", "dt_bias"))
    parameters = tuple(language_model.get_parameter(parameter) for parameter in names)
    norm = GatedNormed(module.norm.eps)
    return lambda joined: DeltaBlock(
        index, kind, joined[f"{name}.in_proj"], joined[f"{name}.out_proj"], norm, names, parameters
    )


def _read_norm(language_model: nn.Module, name: str) -> Norm:
    module = language_model.get_submodule(name)
    if not isinstance(module, FusedRMSNorm):
        raise _UnknownStructureError(f"{name} is a norm of another kind: {module}")
    return Norm(Normed(module.eps, isinstance(module, ZeroCentredRMSNorm)), f"{name}.weight", module.weight)


def _require_children(module: nn.Module, *names: str) -> None:
    found = {name for name, _ in module.named_children()}
    if found != set(names):
        raise _UnknownStructureError(
            f"{type(module).__name__} consists of {', '.join(sorted(found))}, known is {', '.join(sorted(names))}"
        )
