"""Our own walk through the layers of a decoder, for the kinds of layers that we know (`models/read_decoder.py`).

A transformers model computes each linear layer, norm and activation in a module of its own. Here linears that read the
same input are one multiplication (`models/joined_linear.py`), what lies between them is fused (`models/fused.py`), and
the backward is written by hand (`models/packed_lora.py`). Trainer, prompts and the local sampler all walk here. The
transformers modules keep the parameters, of which the tensors here are the same memory; the self-check compares both
ways of computing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tinsmith.models.attention import PassPlan
from tinsmith.models.experts import ExpertStack
from tinsmith.models.fused import UNCHANGED, GatedNormed, Heads, Normed, SigmoidGated, SwiGLU, decay_and_beta
from tinsmith.models.joined_linear import JoinedLinear
from tinsmith.models.layers import DeltaNet
from tinsmith.models.packed_lora import Adapters

# Keeping less of a pass for its backward: layers that are computed again, and their inputs in host memory.
#
# A layer that is recomputed keeps its input alone. The backward computes the layer a second time, which costs about a
# quarter of the pass when all layers do it, and gives the same bits. The first layers are chosen: the backward comes to
# them last, when what the others kept is free again.

HOST_PIECE = 2**26
"""Bytes of host memory that an input of a layer takes at a time."""


def recomputed(layer: Callable[..., Any], x: Tensor, **keywords: Any) -> Any:
    """Return `layer(x, **keywords)`, and keep only x for the backward.

    `layer` is called a second time during the backward, and must find there all that it reads besides its arguments.
    """
    return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False, **keywords)


@dataclass(frozen=True, eq=False)
class _InHostMemory:
    """A tensor that waits in host memory."""

    device: torch.device
    shape: torch.Size
    pieces: list[Tensor]
    """Its numbers. PyTorch takes pinned memory in powers of two: in one piece a tensor might take twice its size."""

    @classmethod
    def of(cls, tensor: Tensor) -> "_InHostMemory":
        """A copy that the host does not wait for."""
        pinned = tensor.device.type == "cuda"
        there = tensor.reshape(-1).split(HOST_PIECE // tensor.dtype.itemsize)
        here = [
            torch.empty(piece.shape, dtype=piece.dtype, pin_memory=pinned).copy_(piece, non_blocking=True)
            for piece in there
        ]
        return cls(tensor.device, tensor.shape, here)

    def back(self) -> Tensor:
        """The tensor on its device again, as a copy that the host does not wait for."""
        numbers = torch.empty(self.shape, dtype=self.pieces[0].dtype, device=self.device)
        for place, piece in zip(numbers.view(-1).split(len(self.pieces[0])), self.pieces, strict=True):
            place.copy_(piece, non_blocking=True)
        return numbers


@contextmanager
def kept_in_host_memory(tokens: int) -> Iterator[None]:
    """Let what the body keeps of a row of `tokens` tokens wait in host memory until the backward needs it.

    Meant for passes that recompute all layers and keep their inputs. The copies are part of the device's stream: nobody
    waits for them.
    """

    def to_host(tensor: Tensor) -> Tensor | _InHostMemory:
        if tensor.ndim < 2 or tokens not in tensor.shape[:2]:  # a weight, or something small
            return tensor
        return _InHostMemory.of(tensor)

    with saved_tensors_hooks(to_host, lambda kept: kept.back() if isinstance(kept, _InHostMemory) else kept):
        yield


# The kinds of layers, and the walk through them.

SWIGLU = SwiGLU()
SIGMOID_GATED = SigmoidGated()


@dataclass(frozen=True, eq=False)
class Deepstack:
    """Features of images that are added to the outputs of the first layers (Qwen3-VL)."""

    index: Tensor
    """[image tokens] int64: their tokens in the row."""
    features: Sequence[Tensor]
    """For each of the first layers, [image tokens, hidden]."""


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary positions (Su et al., arXiv 2104.09864)."""

    inverse_frequencies: Tensor
    """[pairs] float32"""
    scaling: float
    axes: Tensor | None
    """[pairs] int64: the row of positions that turns each pair; None where there is one row."""

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
        return replace(self, weight=parameters.get(self.name, self.weight))


@dataclass(frozen=True, eq=False)
class Pass:
    """State that all layers of one pass share."""

    plan: PassPlan
    adapters: Adapters
    cos: Tensor
    sin: Tensor
    deepstack: Deepstack | None

    def add_images(self, layer: int, delta: Tensor) -> None:
        """Add the features that belong behind a layer to its output, delta [tokens, hidden]."""
        if self.deepstack is not None and layer < len(self.deepstack.features):
            delta.index_add_(0, self.deepstack.index, self.deepstack.features[layer])


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Queries, keys and values, attention, output projection."""

    index: int
    qkv: JoinedLinear
    output: JoinedLinear
    heads: Heads
    norms: tuple[Norm, Norm] | None
    """Those of queries and keys."""
    head_weights: Tensor | None
    """[heads + kv_heads, head_dim]: their weights, for every head."""
    scale: float
    window_of: Any
    """The module or configuration that has the length of the sliding window, if there is one."""

    def __call__(self, x: Tensor, delta: Tensor | None, norm: Norm, shared: Pass) -> tuple[Tensor, Tensor]:
        """Return the sum of x and delta [tokens, hidden], and the block's output for it, to be added later."""
        total, query, key, value, *gate = self.enter(x, delta, norm, shared)
        return total, self.leave(self.attend(shared.plan, query, key, value), gate, shared)

    def enter(self, x: Tensor, delta: Tensor | None, norm: Norm, shared: Pass) -> tuple[Tensor, ...]:
        """Compute token by token the sum of x and delta; query, key and value; and gate, if there is one."""
        qkv, total = shared.adapters.project(self.qkv, norm.kind, x, delta, norm.weight)
        return total, *self.heads.forward(qkv, self.head_weights, shared.cos, shared.sin)

    def attend(self, plan: PassPlan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention between the tokens of the pass: [tokens, heads, head_dim]."""
        window = None if self.window_of is None else self.window_of.sliding_window
        return plan.attend(self.index, query, key, value, self.scale, window)

    def leave(self, out: Tensor, gate: Sequence[Tensor], shared: Pass) -> Tensor:
        """Project attention's output [tokens, heads, head_dim] to [tokens, hidden]."""
        if gate:
            return shared.adapters.project(self.output, SIGMOID_GATED, out, *gate)[0]
        return shared.adapters.project(self.output, UNCHANGED, out.flatten(1))[0]

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "AttentionBlock":
        """Use these parameters, by name, in the place of its own."""
        norms = (
            None
            if self.norms is None
            else (self.norms[0].with_weights(parameters), self.norms[1].with_weights(parameters))
        )
        return replace(
            self,
            qkv=self.qkv.with_weights(parameters),
            output=self.output.with_weights(parameters),
            norms=norms,
            head_weights=head_weights(norms, self.heads),
        )


@dataclass(frozen=True, eq=False)
class DeltaBlock:
    """A gated delta net: projection, convolution, delta rule, gated norm, output projection."""

    index: int
    kind: DeltaNet
    projection: JoinedLinear
    """To queries, keys and values, the gate z, and b and a."""
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
        together, total = shared.adapters.project(self.projection, norm.kind, x, delta, norm.weight)
        values, keys = kind.value_heads * kind.value_dim, kind.key_heads * kind.key_dim
        mixed, gate, b, a = together.split([kind.channels, values, kind.value_heads, kind.value_heads], -1)
        mixed = shared.plan.convolve(self.index, mixed, taps.squeeze(1))  # [tokens, channels]
        query, key, value = mixed.split([keys, keys, values], -1)
        decay, beta = decay_and_beta(a, b, a_log, dt_bias)
        out = shared.plan.delta_rule(
            self.index,
            query.unflatten(-1, (kind.key_heads, kind.key_dim)),
            key.unflatten(-1, (kind.key_heads, kind.key_dim)),
            value.unflatten(-1, (kind.value_heads, kind.value_dim)),
            decay,
            beta,
        )  # [tokens, value_heads, value_dim]
        gate = gate.unflatten(-1, (kind.value_heads, kind.value_dim))
        return total, shared.adapters.project(self.output, self.norm, out, gate, norm_weight)[0]

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "DeltaBlock":
        """Use these parameters, by name, in the place of its own."""
        return replace(
            self,
            projection=self.projection.with_weights(parameters),
            output=self.output.with_weights(parameters),
            parameters=tuple(parameters.get(name, own) for name, own in zip(self.names, self.parameters, strict=True)),
        )


@dataclass(frozen=True, eq=False)
class DenseMLP:
    """A SwiGLU MLP: down(silu(gate(x)) · up(x))."""

    gate_up: JoinedLinear
    down: JoinedLinear

    def __call__(self, x: Tensor, delta: Tensor, norm: Norm, shared: Pass) -> tuple[Tensor, Tensor]:
        """Return the sum of x and delta [tokens, hidden], and the MLP's output for its norm."""
        gate_up, x = shared.adapters.project(self.gate_up, norm.kind, x, delta, norm.weight)
        return x, shared.adapters.project(self.down, SWIGLU, gate_up)[0]

    def of_normed(self, normed: Tensor, shared: Pass) -> Tensor:
        """Compute the MLP for what has gone through the norm: [tokens, hidden]."""
        gate_up = shared.adapters.apply(self.gate_up, normed)
        return shared.adapters.project(self.down, SWIGLU, gate_up)[0]

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "DenseMLP":
        """Use these parameters, by name, in the place of its own."""
        return DenseMLP(self.gate_up.with_weights(parameters), self.down.with_weights(parameters))


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """The expert that computes every token, times the sigmoid of a gate."""

    mlp: DenseMLP
    gate: JoinedLinear
    """[1, hidden]; not trained by LoRA."""

    def __call__(self, normed: Tensor, shared: Pass) -> Tensor:
        """Compute it for what has gone through the norm: [tokens, hidden]."""
        return shared.adapters.apply(self.gate, normed).sigmoid() * self.mlp.of_normed(normed, shared)

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "SharedExpert":
        """Use these parameters, by name, in the place of its own."""
        return SharedExpert(self.mlp.with_weights(parameters), self.gate.with_weights(parameters))


@dataclass(frozen=True, eq=False)
class ExpertMLP:
    """A mixture of experts, and the shared expert beside it if there is one."""

    number: int
    """Its place among the mixtures of the decoder."""
    stack: ExpertStack
    shared_expert: SharedExpert | None

    def __call__(self, x: Tensor, delta: Tensor, norm: Norm, shared: Pass) -> tuple[Tensor, Tensor]:
        """Return the sum of x and delta [tokens, hidden], and the experts' output for its norm."""
        normed, total = norm.kind.with_sum(x, delta, norm.weight)
        weights, chosen = shared.adapters.route(self.stack, normed, partial(shared.plan.choose, self.number))
        out = shared.adapters.mix(self.stack, normed, weights, chosen)
        out = shared.adapters.mix(self.stack, normed, weights, chosen)
        return total, out if self.shared_expert is None else out + self.shared_expert(normed, shared)

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "ExpertMLP":
        """Use these parameters, by name, in the place of its own."""
        own = None if self.shared_expert is None else self.shared_expert.with_weights(parameters)
        return ExpertMLP(self.number, self.stack.with_weights(parameters), own)


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of the decoder: attention or a gated delta net, then a SwiGLU MLP or a mixture of experts."""

    block: AttentionBlock | DeltaBlock
    first_norm: Norm
    second_norm: Norm
    mlp: DenseMLP | ExpertMLP

    def __call__(self, x: Tensor, delta: Tensor | None, shared: Pass) -> tuple[Tensor, Tensor]:
        """Map the sum of x and delta [tokens, hidden] to two such tensors whose sum is the output."""
        x, delta = self.mlp(*self.block(x, delta, self.first_norm, shared), self.second_norm, shared)
        shared.add_images(self.block.index, delta)
        return x, delta

    def total(self, x: Tensor, shared: Pass) -> Tensor:
        """Map x to the output, both one tensor."""
        x, delta = self(x, None, shared)
        return x + delta

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "Layer":
        """Use these parameters, by name, in the place of its own."""
        return Layer(
            self.block.with_weights(parameters),
            self.first_norm.with_weights(parameters),
            self.second_norm.with_weights(parameters),
            self.mlp.with_weights(parameters),
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
        before_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, of shape [tokens, hidden] like embeddings; positions [1 or 3, tokens].

        The first `recompute` layers keep only their input for the backward, which computes them again. `before_layer`
        is called with the number of each layer, in the backward too: it may raise to end the pass, or give the device
        other work.

        Without gradients nothing waits for the device or depends on values in tensors: CUDA graphs can capture it.
        """
        shared = Pass(plan, adapters, *self.rope.angles(positions), deepstack)
        x, delta = embeddings, None
        for index, layer in enumerate(self.layers):
            if before_layer:
                before_layer(index)
            if index < recompute and torch.is_grad_enabled():
                x = recomputed(layer.total, x, shared=shared)
            else:
                x, delta = layer(x, delta, shared)
            if before_layer and x.requires_grad:
                x.register_hook(lambda _, index=index: before_layer(index))
        return self.finish(x, delta)

    def finish(self, x: Tensor, delta: Tensor | None) -> Tensor:
        """The last norm of the sum of x and delta [tokens, hidden]."""
        return self.last_norm.kind.alone(x, delta, self.last_norm.weight)

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "Decoder":
        """Use these parameters, by their names inside the language model, in the place of its own."""
        layers = tuple(layer.with_weights(parameters) for layer in self.layers)
        return Decoder(layers, self.last_norm.with_weights(parameters), self.rope)


def head_weights(norms: tuple[Norm, Norm] | None, shape: Heads) -> Tensor | None:
    """[heads + kv_heads, head_dim]: the weight of the norm of each head."""
    if norms is None:
        return None
    counts = (shape.heads, shape.kv_heads)
    return torch.cat([norm.weight.expand(count, -1) for norm, count in zip(norms, counts, strict=True)])
