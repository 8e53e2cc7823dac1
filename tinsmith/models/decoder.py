"""Our own walk through the layers of a decoder, for the kinds of layers that we know.

A transformers model computes each linear layer, norm and activation in a module of its own. Here linears that read the same input are one
multiplication (`models/joined_linear.py`), what lies between them is fused (`models/fused.py`), and the backward is written by hand
(`models/packed_lora.py`). Trainer, prompts and the local sampler all walk here. The transformers modules keep the parameters, of which the
tensors here are the same memory; the self-check compares both ways of computing.

`read_decoder` takes apart what it knows and nothing else: a model of another type, or with a module or an activation that does not belong
there, runs through its transformers modules.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.models.fused import GatedNormed, Heads, Normed, SigmoidGated, SwiGLU, memory_gates, memory_gates_backward
from tinsmith.models.joined_linear import JoinedLinear, join_linears
from tinsmith.models.layers import Attention, DeltaNet
from tinsmith.models.layout import Layout
from tinsmith.models.norms import FusedRMSNorm, GatedRMSNorm, ZeroCentredRMSNorm
from tinsmith.models.packed_lora import UNCHANGED, Adapters, Before
from tinsmith.models.pass_plan import PassPlan
from tinsmith.models.recompute import recomputed

log = logging.getLogger(__name__)

KNOWN_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_text")
"""Model types whose decoders compute what stands here: the structure alone does not tell which halves of a head turn together."""
INTERLEAVED = ("qwen3_vl", "qwen3_5")
"""Model types that deal the rotary pairs of a head out to time, height and width in turns; the others give each a stretch."""

PARTS = 4
"""The layers of a pass are computed in so many parts, if something is to be done between them."""

SWIGLU = SwiGLU()
SIGMOID_GATED = SigmoidGated()


@dataclass(frozen=True, eq=False)
class Deepstack:
    """Features of images that are added to the outputs of the first layers (Qwen3-VL)."""

    index: Tensor
    """[image tokens] int64: which tokens they belong to."""
    features: Sequence[Tensor]
    """For each of the first layers, [image tokens, hidden]."""


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary positions (Su et al., arXiv 2104.09864)."""

    inverse_frequencies: Tensor
    """[pairs] float32"""
    scaling: float
    axes: Tensor | None
    """[pairs] int64: which of the three rows of positions turns each pair; None where there is one row."""

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [tokens, pairs] in float32 of positions [1 or 3, tokens]."""
        rows = positions.float()
        turned = rows[0].unsqueeze(1) if self.axes is None or len(rows) == 1 else rows.index_select(0, self.axes).t()
        angles = (turned * self.inverse_frequencies).contiguous()  # of a transposed matrix it would lie transposed
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.scaling == 1.0 else (cos * self.scaling, sin * self.scaling)


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMS norm and its weight."""

    kind: Normed
    name: str
    """Name of the weight inside the language model."""
    weight: Tensor

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "Norm":
        """The same with the weight that is there, if one is."""
        return replace(self, weight=parameters.get(self.name, self.weight))


@dataclass(frozen=True, eq=False)
class Pass:
    """State that all layers of one pass share."""

    plan: PassPlan
    adapters: Adapters
    cos: Tensor
    sin: Tensor
    deepstack: Deepstack | None

    def linear(self, linear: JoinedLinear, before: Before, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """The layer with the adapters of the pass, behind what `before` computes of the inputs; and the other results of `before`."""
        return self.adapters.project(linear, before, *inputs)

    def add_images(self, layer: int, delta: Tensor) -> None:
        """Add the features that belong behind a layer to what its MLP gives, delta [tokens, hidden]."""
        if self.deepstack is not None and layer < len(self.deepstack.features):
            delta.index_add_(0, self.deepstack.index, self.deepstack.features[layer])


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Queries, keys and values, attention, output projection."""

    index: int
    """Number of the layer."""
    qkv: JoinedLinear
    output: JoinedLinear
    heads: Heads
    norms: tuple[Norm, Norm] | None
    """Those of queries and keys."""
    head_weights: Tensor | None
    """[heads + kv_heads, head_dim]: the weights of these norms, for every head."""
    scale: float
    window_of: Any
    """The module or configuration that has the length of the sliding window; None where there is none."""

    def __call__(self, x: Tensor, delta: Tensor | None, norm: Norm, shared: Pass) -> tuple[Tensor, Tensor]:
        """Return the sum of x and delta [tokens, hidden], and the block's output for it, to be added later."""
        total, query, key, value, *gate = self.enter(x, delta, norm, shared)
        return total, self.leave(self.attend(shared.plan, query, key, value), gate, shared)

    def enter(self, x: Tensor, delta: Tensor | None, norm: Norm, shared: Pass) -> tuple[Tensor, ...]:
        """Compute the inputs of attention token by token: the sum of x and delta; query, key and value; and gate, if there is one."""
        qkv, total = shared.linear(self.qkv, norm.kind, x, delta, norm.weight)
        return total, *self.heads.forward(qkv, self.head_weights, shared.cos, shared.sin)

    def attend(self, plan: PassPlan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention between the tokens of the pass: [tokens, heads, head_dim]."""
        window = None if self.window_of is None else self.window_of.sliding_window
        return plan.attend(self.index, query, key, value, self.scale, window)

    def leave(self, out: Tensor, gate: Sequence[Tensor], shared: Pass) -> Tensor:
        """Project attention's output [tokens, heads, head_dim] to [tokens, hidden]."""
        if gate:
            return shared.linear(self.output, SIGMOID_GATED, out, *gate)[0]
        return shared.linear(self.output, UNCHANGED, out.flatten(1))[0]

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "AttentionBlock":
        """The same with these parameters where they are there."""
        norms = None if self.norms is None else (self.norms[0].with_weights(parameters), self.norms[1].with_weights(parameters))
        return replace(
            self,
            qkv=self.qkv.with_weights(parameters),
            output=self.output.with_weights(parameters),
            norms=norms,
            head_weights=_head_weights(norms, self.heads),
        )


@dataclass(frozen=True, eq=False)
class DeltaBlock:
    """A gated delta net: projections, convolution, delta rule, gated norm, output projection."""

    index: int
    kind: DeltaNet
    projection: JoinedLinear
    """Joint projection to queries, keys and values, the gate z, and b and a."""
    output: JoinedLinear
    norm: GatedNormed
    names: tuple[str, ...]
    """Names of the parameters inside the language model."""
    parameters: tuple[Tensor, ...]
    """Weight of the norm [value_dim], of the convolution [channels, 1, taps], A_log and dt_bias [value_heads]."""

    def __call__(self, x: Tensor, delta: Tensor | None, norm: Norm, shared: Pass) -> tuple[Tensor, Tensor]:
        """Return the sum of x and delta [tokens, hidden], and the block's output for it, to be added later."""
        kind = self.kind
        norm_weight, taps, a_log, dt_bias = self.parameters
        together, total = shared.linear(self.projection, norm.kind, x, delta, norm.weight)
        values, keys = kind.value_heads * kind.value_dim, kind.key_heads * kind.key_dim
        mixed, gate, b, a = together.split([kind.channels, values, kind.value_heads, kind.value_heads], -1)
        mixed = shared.plan.convolve(self.index, mixed, taps.squeeze(1))  # [tokens, channels]
        query, key, value = mixed.split([keys, keys, values], -1)
        decay, beta = _gates(a, b, a_log, dt_bias)
        out = shared.plan.delta_rule(
            self.index,
            query.unflatten(-1, (kind.key_heads, kind.key_dim)),
            key.unflatten(-1, (kind.key_heads, kind.key_dim)),
            value.unflatten(-1, (kind.value_heads, kind.value_dim)),
            decay,
            beta,
        )  # [tokens, value_heads, value_dim]
        return total, shared.linear(self.output, self.norm, out, gate.unflatten(-1, (kind.value_heads, kind.value_dim)), norm_weight)[0]

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "DeltaBlock":
        """The same with these parameters where they are there."""
        return replace(
            self,
            projection=self.projection.with_weights(parameters),
            output=self.output.with_weights(parameters),
            parameters=tuple(parameters.get(name, own) for name, own in zip(self.names, self.parameters, strict=True)),
        )


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of the decoder: attention or a gated delta net, then a SwiGLU MLP."""

    block: AttentionBlock | DeltaBlock
    first_norm: Norm
    second_norm: Norm
    gate_up: JoinedLinear
    down: JoinedLinear

    def __call__(self, x: Tensor, delta: Tensor | None, shared: Pass) -> tuple[Tensor, Tensor]:
        """The layer gets the sum of x and delta [tokens, hidden], and gives two such tensors whose sum is its output."""
        x, delta = self.mlp(*self.block(x, delta, self.first_norm, shared), shared)
        shared.add_images(self.block.index, delta)
        return x, delta

    def mlp(self, x: Tensor, delta: Tensor, shared: Pass) -> tuple[Tensor, Tensor]:
        """The sum of x and delta, which are what the block gives, and what the MLP adds to it."""
        gate_up, x = shared.linear(self.gate_up, self.second_norm.kind, x, delta, self.second_norm.weight)
        return x, shared.linear(self.down, SWIGLU, gate_up)[0]

    def total(self, x: Tensor, shared: Pass) -> Tensor:
        """The same with one tensor for each sum."""
        x, delta = self(x, None, shared)
        return x + delta

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "Layer":
        """The same with these parameters where they are there."""
        return Layer(
            self.block.with_weights(parameters),
            self.first_norm.with_weights(parameters),
            self.second_norm.with_weights(parameters),
            self.gate_up.with_weights(parameters),
            self.down.with_weights(parameters),
        )


@dataclass(frozen=True, eq=False)
class Decoder:
    """All layers of a language model, between its embedding and its output projection."""

    layers: tuple[Layer, ...]
    last_norm: Norm
    rope: Rope

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        plan: PassPlan,
        adapters: Adapters,
        deepstack: Deepstack | None = None,
        recompute: int = 0,
        between: Callable[[], None] | None = None,
        look: Callable[[], None] | None = None,
    ) -> Tensor:
        """Hidden states [tokens, hidden] after the last norm, of embeddings [tokens, hidden] and positions [1 or 3, tokens].

        The first `recompute` layers keep only their input for the backward, which computes them again. Without gradients nothing waits for
        the device, and nothing depends on what lies in the tensors: a pass can be captured as a CUDA graph.

        `between` is called between parts of the layers: what is short need not wait for all of a long pass. `look` is called before each
        layer, in the backward too, and may raise to end the pass.
        """
        shared = Pass(plan, adapters, *self.rope.angles(positions), deepstack)
        x, delta = embeddings, None
        for index, layer in enumerate(self.layers):
            if look:
                look()
            if index < recompute and torch.is_grad_enabled():
                x = recomputed(layer.total, x, shared=shared)
            else:
                x, delta = layer(x, delta, shared)
            if look and x.requires_grad:
                x.register_hook(lambda _: look())
            if between and (index + 1) % -(-len(self.layers) // PARTS) == 0 and index + 1 < len(self.layers):
                between()
        return self.finish(x, delta)

    def finish(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """The last norm of the sum of x and delta [tokens, hidden]."""
        return _last_norm(self.last_norm.kind, x, delta, self.last_norm.weight)

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "Decoder":
        """The same with these parameters, by their names inside the language model, in the place of its own where they are there."""
        layers = tuple(layer.with_weights(parameters) for layer in self.layers)
        return Decoder(layers, self.last_norm.with_weights(parameters), self.rope)


def _last_norm(kind: Normed, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        compute: Any = _Alone.apply
        out: Tensor = compute(kind, x, delta, weight)
        return out
    return kind.forward(x, delta, weight)[0]


class _Alone(torch.autograd.Function):
    """A norm without a linear layer behind it."""

    @staticmethod
    def forward(ctx: Any, kind: Normed, *inputs: Tensor | None) -> Tensor:
        ctx.kind = kind
        normed, _, kept = kind.forward(*inputs)
        ctx.save_for_backward(*kept)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found, _ = ctx.kind.backward(ctx.saved_tensors, grads[0], (None,), ctx.needs_input_grad[1:])
        return None, *found


def _gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled():
        compute: Any = _Gates.apply
        decay, beta = compute(a, b, a_log, dt_bias)
        return decay, beta
    return memory_gates(a, b, a_log, dt_bias)


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        return memory_gates(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b, a_log, dt_bias = ctx.saved_tensors
        d_a, d_b, d_a_log = memory_gates_backward(a, b, a_log, dt_bias, *grads)
        wants_a_log, wants_dt_bias = ctx.needs_input_grad[2:]
        return (
            d_a,
            d_b,
            d_a_log.sum(0).to(a_log.dtype) if wants_a_log else None,
            d_a.sum(0, dtype=d_a_log.dtype).to(dt_bias.dtype) if wants_dt_bias else None,
        )


# Taking a transformers model apart


class UnknownStructureError(Exception):
    """Something of the model is none of what this module computes."""


def read_decoder(model_type: str, language_model: nn.Module, layout: Layout) -> Decoder | None:
    """The decoder of a loaded language model whose norms are fused, before LoRA is attached to it; None if it is of another structure.

    The weights of its linears are joined. If the answer is None nothing has changed.
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
    """Read the parts of a decoder whose linears are still to be joined. Changes nothing, and returns None as `read_decoder` does."""
    if model_type not in KNOWN_TYPES:
        return None
    try:
        return _parts_of(model_type, language_model, layout)
    except UnknownStructureError as error:
        log.warning("%s runs through its transformers modules, which is slower than our own decoder: %s", model_type, error)
        return None


def _parts_of(model_type: str, language_model: Any, layout: Layout) -> DecoderParts:
    _require_children(language_model, "embed_tokens", "layers", "norm", "rotary_emb")
    rope = _read_rope(model_type, language_model)
    last_norm = _read_norm(language_model, "norm")
    layers = [_read_layer(model_type, language_model, index, layout) for index in range(len(layout.layers))]
    if len(language_model.layers) != len(layers):
        raise UnknownStructureError(f"it has {len(language_model.layers)} layers, its configuration says {len(layers)}")
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
        raise UnknownStructureError(f"mrope_section={sections} does not divide its {pairs} rotary pairs")
    return Rope(frequencies, float(rotary.attention_scaling), axes.to(frequencies.device))


def _read_layer(model_type: str, language_model: Any, index: int, layout: Layout) -> Build:
    name, kind = f"layers.{index}", layout.layers[index]
    layer = language_model.get_submodule(name)
    attends = isinstance(kind, Attention)
    _require_children(layer, "self_attn" if attends else "linear_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    _require_children(layer.mlp, "gate_proj", "up_proj", "down_proj", "act_fn")
    if not _is_silu(layer.mlp.act_fn):
        raise UnknownStructureError(f"{name}.mlp has the activation {layer.mlp.act_fn}")
    first, second = (_read_norm(language_model, f"{name}.{norm}") for norm in ("input_layernorm", "post_attention_layernorm"))
    if isinstance(kind, Attention):
        block = _read_attention(model_type, language_model, index, kind)
    else:
        block = _read_delta_net(language_model, index, kind)
    _require_projections(layout, f"{name}.mlp.gate_up", f"{name}.mlp.down_proj")
    return lambda joined: Layer(block(joined), first, second, joined[f"{name}.mlp.gate_up"], joined[f"{name}.mlp.down_proj"])


def _read_attention(model_type: str, language_model: Any, index: int, kind: Attention) -> Build:
    name = f"layers.{index}.self_attn"
    module = language_model.get_submodule(name)
    children = {child for child, _ in module.named_children()}
    linears = {"q_proj", "k_proj", "v_proj", "o_proj"}
    if children not in (linears, linears | {"q_norm", "k_norm"}):
        raise UnknownStructureError(f"{name} consists of {', '.join(sorted(children))}")
    norms = (_read_norm(language_model, f"{name}.q_norm"), _read_norm(language_model, f"{name}.k_norm")) if "q_norm" in children else None
    heads, rest = divmod(module.o_proj.weight.shape[1], kind.head_dim)
    gated = model_type.startswith("qwen3_5")
    widths = (heads * kind.head_dim * (2 if gated else 1), kind.kv_heads * kind.head_dim, kind.kv_heads * kind.head_dim)
    if rest or tuple(len(getattr(module, f"{part}_proj").weight) for part in "qkv") != widths:
        raise UnknownStructureError(f"queries, keys and values of {name} do not have {widths} outputs")
    if norms is not None and (norms[0].kind != norms[1].kind or any(norm.weight.shape != (kind.head_dim,) for norm in norms)):
        raise UnknownStructureError(f"the norms of queries and keys of {name} differ, or are not those of single heads")
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
        _head_weights(norms, shape),
        float(module.scaling),
        window_of,
    )


def _read_delta_net(language_model: Any, index: int, kind: DeltaNet) -> Build:
    name = f"layers.{index}.linear_attn"
    module = language_model.get_submodule(name)
    _require_children(module, "conv1d", "norm", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    if not isinstance(module.norm, GatedRMSNorm) or module.conv1d.bias is not None or module.activation not in ("silu", "swish"):
        raise UnknownStructureError(f"{name} has another norm, convolution or activation")
    names = tuple(f"{name}.{parameter}" for parameter in ("norm.weight", "conv1d.weight", "A_log", "dt_bias"))
    parameters = tuple(language_model.get_parameter(parameter) for parameter in names)
    norm = GatedNormed(module.norm.eps)
    return lambda joined: DeltaBlock(index, kind, joined[f"{name}.in_proj"], joined[f"{name}.out_proj"], norm, names, parameters)


def _read_norm(language_model: nn.Module, name: str) -> Norm:
    module = language_model.get_submodule(name)
    if not isinstance(module, FusedRMSNorm):
        raise UnknownStructureError(f"{name} is a norm of another kind: {module}")
    return Norm(Normed(module.eps, isinstance(module, ZeroCentredRMSNorm)), f"{name}.weight", module.weight)


def _head_weights(norms: tuple[Norm, Norm] | None, shape: Heads) -> Tensor | None:
    """[heads + kv_heads, head_dim]: the weight of the norm of each head."""
    if norms is None:
        return None
    counts = (shape.heads, shape.kv_heads)
    return torch.cat([norm.weight.expand(count, -1) for norm, count in zip(norms, counts, strict=True)])


def _require_children(module: nn.Module, *names: str) -> None:
    found = {name for name, _ in module.named_children()}
    if found != set(names):
        raise UnknownStructureError(f"{type(module).__name__} consists of {', '.join(sorted(found))}, known is {', '.join(sorted(names))}")


def _require_projections(layout: Layout, *names: str) -> None:
    for name in names:
        if name not in layout.projections:
            raise UnknownStructureError(f"its layout has no {name}")


def _is_silu(activation: nn.Module) -> bool:
    x = torch.linspace(-8, 8, 33)
    return torch.equal(activation(x), nn.functional.silu(x))
