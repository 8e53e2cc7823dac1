"""Estimates from a model's sizes the memory of a pass, and how many layers must be recomputed to fit.

Passes and plans use it. The memory is largest at one of two moments: when the forward has ended and the LM head is
computed, and while the last of the recomputed layers is computed again, when the others wait with their inputs alone. A
test holds the estimate to the bytes that passes really take.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import torch

from tinsmith.kernels.delta_nets import CHUNK, STATE_BYTES
from tinsmith.models.layers import Attention, DeltaNet, Experts
from tinsmith.models.layout import Layout, LoraTarget
from tinsmith.models.read_decoder import KNOWN_TYPES

FLOAT = 4
"""Bytes of a float32 number."""
EACH_TOKEN = 64
"""Bytes of each token of a shared sequence on every worker: id, positions, target, loss inputs, logprob, loss."""
EACH_PAIR = 40
"""Bytes of each expert of a token: its number, its places in the order of experts and of tokens, and its weights."""


@dataclass(frozen=True)
class Recomputation:
    """The layers that a pass computes again to save memory, which changes no bit."""

    recompute: int = 0
    """Number of first layers that keep only their inputs and are computed again."""
    offload: bool = False
    """Whether these inputs wait in host memory."""


KEEP_ALL = Recomputation()


@dataclass(frozen=True)
class PassMemory:
    """Bytes that passes over one base model take, by tokens."""

    kept: tuple[int, ...]
    """Bytes that each layer keeps of a token."""
    input: int
    """Bytes of a token in the input of a layer: all that a recomputed layer keeps."""
    transient: int
    """Bytes of a token in the backward of a layer's MLP or experts, beside what the layer keeps."""
    ends: int
    """Bytes kept of a token before the first layer and after the last."""
    logits: int
    """Bytes that the LM head takes of a token whose logits are in memory."""
    logits_chunks: int = 1
    """Most chunks of logits in memory at a time."""
    rule: int = 0
    """Bytes of a token in the backward of a delta rule's kernels, if they compute all heads at once."""
    rule_most: int = 0
    """Most of these bytes: for many tokens some heads are computed after others."""
    around_rule: int = 0
    """Bytes of a token beside these, over what the layer keeps; negative, since its MLP keeps nothing any more."""
    sharded: bool = False
    """Whether the layers are sharded over workers: all are recomputed then, because none stays."""

    @property
    def smallest(self) -> Recomputation:
        """Least memory without the host's help. The last layer is not recomputed: its backward comes at once."""
        return Recomputation(0 if self.sharded else max(0, len(self.kept) - 1))

    @property
    def smallest_with_host(self) -> Recomputation:
        """Least memory of the device. Only inputs may wait in host memory, so the last layer is recomputed as well."""
        return Recomputation(len(self.kept), offload=True)

    def bytes(self, tokens: int, logits_chunk: int, recomputation: Recomputation) -> int:
        """Return the bytes of a forward_backward pass beyond weights and accumulators; `logits_chunk` counts rows."""
        recompute = len(self.kept) if self.sharded else recomputation.recompute
        again = self.kept[:recompute]
        # Copies to the host are part of the stream of the device: the input of one layer is there, and that of the next
        # on its way.
        inputs = min(2, len(again)) if recomputation.offload else len(again)
        kept = inputs * self.input + sum(self.kept[recompute:])
        head = min(self.logits_chunks * logits_chunk, tokens) * self.logits
        transient = max(tokens * self.transient, tokens * self.around_rule + min(tokens * self.rule, self.rule_most))
        forward_ends = tokens * kept + max(head, transient)
        # A layer that is computed again comes when all that follow have freed what they kept.
        layer_again = tokens * (inputs * self.input + max(again, default=0)) + transient
        return tokens * self.ends + max(forward_ends, layer_again)

    def host_bytes(self, tokens: int, recomputation: Recomputation) -> int:
        """Return the bytes that wait in host memory meanwhile."""
        return tokens * self.input * recomputation.recompute if recomputation.offload else 0

    def recomputation_for(self, tokens: int, logits_chunk: int, free: int) -> Recomputation | None:
        """The least recomputation with which a pass fits into `free` bytes; None if it never fits."""
        # More layers never take more
        choices = [Recomputation(layers) for layers in range(self.smallest.recompute + 1)]
        first = bisect_left(choices, True, key=lambda choice: self.bytes(tokens, logits_chunk, choice) <= free)
        return choices[first] if first < len(choices) else None

    def longest(self, logits_chunk: int, free: int, host_free: int, limit: int) -> int:
        """The most tokens, up to `limit`, of which a pass fits somehow.

        Inputs of recomputed layers may take `host_free` bytes of host memory: 0 where the device computes in host
        memory itself.
        """
        return bisect_left(
            range(1, limit + 1), True, key=lambda tokens: not self._fits(tokens, logits_chunk, free, host_free)
        )

    def _fits(self, tokens: int, logits_chunk: int, free: int, host_free: int) -> bool:
        if self.bytes(tokens, logits_chunk, self.smallest) <= free:
            return True
        host = self.smallest_with_host
        return self.host_bytes(tokens, host) <= host_free and self.bytes(tokens, logits_chunk, host) <= free


def pass_memory_of(layout: Layout, text_config: Any, dtype: torch.dtype, sharded: bool = False) -> PassMemory:
    """Return the memory of passes over a model; `sharded` if workers share its layers."""
    hidden: int = text_config.hidden_size
    own = layout.family.model_type in KNOWN_TYPES
    by_layer: list[list[LoraTarget]] = [[] for _ in layout.layers]
    for target in layout.targets.values():
        if target.group != "unembed":
            by_layer[int(target.module.split(".")[1])].append(target)
    kept, widest, copied = [], 0, 0
    for number, (kind, targets) in enumerate(zip(layout.layers, by_layer, strict=True)):
        # Of the outputs of a block's linears, those of the last one are as wide as the row itself.
        around = sum(target.out_features for target in targets if target.group == "attn") - hidden
        mixing = _attention(kind, text_config, around) if isinstance(kind, Attention) else _delta_net(kind, around, own)
        if (experts := layout.experts.get(number)) is not None:
            widest = max(widest, 2 * experts.per_token * experts.width, 2 * experts.shared_width)
            copied = max(copied, experts.per_token * hidden)
            kept.append((mixing + 2 * hidden) * dtype.itemsize + _experts(experts, hidden, dtype))
            continue
        gate_up = sum(target.out_features for target in targets if target.group == "mlp") - hidden
        widest = max(widest, gate_up)
        # The row before both norms, and what goes into the activation. The modules of transformers keep the row behind
        # the norms too, and of the MLP the gate before and behind the activation, what it multiplies, and the product.
        numbers = mixing + (2 * hidden + gate_up if own else 4 * hidden + 2 * gate_up)
        kept.append(numbers * dtype.itemsize)
    # In half precision logits become their gradient in place, and some of them are float32 for a while; in float32
    # there are two of each.
    wide = dtype.itemsize >= FLOAT
    logits: int = text_config.vocab_size * (2 * FLOAT if wide else dtype.itemsize + 1)
    row, between = hidden * dtype.itemsize, widest * dtype.itemsize
    # The backward of our own layers has in memory at once the gradients of the MLP's inside, and what it computes
    # again; where its formulas run as written, also what lies between them. Of experts also gradients of a token's
    # copies: one meanwhile, and three when those of its input are added up.
    inside = (4 if wide else 2) * between if own else between
    if copied:
        copies = copied * dtype.itemsize
        inside = max(copies + inside + between // 2, 3 * copies + 2 * between)
    transient = 2 * row + inside
    memory = PassMemory(tuple(kept), row, transient, 2 * row, logits, logits_chunks=1 if wide else 4, sharded=sharded)
    delta_nets = {number: kind for number, kind in enumerate(layout.layers) if isinstance(kind, DeltaNet)}
    if dtype != torch.bfloat16 or not delta_nets:
        return memory
    number, kind = next(iter(delta_nets.items()))
    rule, most = _rule_kernels(kind)
    # Of the convolution's inputs and outputs, and of the rule's outputs
    gradients = (2 * kind.channels + kind.value_heads * kind.value_dim) * dtype.itemsize
    # What the MLP kept: what lies before its norm, and inside of it
    freed = _experts(layout.experts[number], hidden, dtype) if number in layout.experts else between
    return replace(memory, rule=rule, rule_most=most, around_rule=gradients - 2 * row - freed)


def sliced_pass_memory_of(layout: Layout, text_config: Any, dtype: torch.dtype, count: int) -> PassMemory:
    """Return the memory of each of `count` workers that compute a sequence together, for each token of its slice.

    Exchanging tokens of all heads for all tokens of some heads takes more than a worker alone does: inputs of attention
    or of a delta rule, and its output in both orders. Heads of keys and values that are fewer than the workers are on
    several.
    """
    alone = pass_memory_of(layout, text_config, dtype)
    kept, exchanged = [], 0
    for of_layer, kind in zip(alone.kept, layout.layers, strict=True):
        if isinstance(kind, Attention):
            queries, others = (
                text_config.num_attention_heads * kind.head_dim,
                2 * kind.head_dim * _spread(kind.kv_heads, count),
            )
        else:
            queries, others = (
                kind.value_heads * kind.value_dim,
                2 * kind.key_dim * _spread(kind.key_heads, count) + kind.channels,
            )
        exchanged = max(exchanged, 2 * queries + others)
        kept.append(of_layer + (queries + others) * dtype.itemsize)
    # Gradients of what was exchanged, before and behind the exchange.
    transient = max(alone.transient, 3 * exchanged * dtype.itemsize)
    return replace(alone, kept=tuple(kept), transient=transient, ends=alone.ends + count * EACH_TOKEN)


def _spread(heads: int, count: int) -> int:
    """Heads of all workers together, if each has one at least."""
    return -(-heads // count) * count


def _attention(kind: Attention, text_config: Any, projected: int) -> int:
    """Numbers kept of a token: projections, queries and keys with their positions, the output and its normalisers."""
    heads: int = text_config.num_attention_heads
    queries, keys = heads * kind.head_dim, kind.kv_heads * kind.head_dim
    return projected + (queries + keys) + queries + heads


def _experts(kind: Experts, hidden: int, dtype: torch.dtype) -> int:
    """Bytes that a mixture of experts keeps of a token.

    What lies behind its norm; of each expert of the token what goes into the activation; of a shared expert that, and
    its output. The few columns of LoRA's ranks are left out.
    """
    numbers = hidden + 2 * kind.per_token * kind.width
    if kind.shared_width:
        numbers += 2 * kind.shared_width + hidden
    return numbers * dtype.itemsize + kind.count * FLOAT + kind.per_token * EACH_PAIR


def _delta_net(kind: DeltaNet, projected: int, own: bool) -> int:
    """Numbers kept of a token: the inputs of the convolution, of the rule, of the norm and of what follows."""
    values, gates = kind.value_heads * kind.value_dim, 4 * kind.value_heads
    if own:
        return projected + kind.channels + values + gates
    return 2 * kind.channels + 3 * values + gates


def _rule_kernels(kind: DeltaNet) -> tuple[int, int]:
    """Bytes that `kernels/delta_rule.py` takes for a token in the backward, and the most that it takes at once.

    For each chunk and head two matrices of its tokens, U and X, the states before it and their gradient, each in two
    parts of bfloat16; and in float32 the factors of its tokens, and gradients of queries and keys.
    """
    pairs = 2 * CHUNK * CHUNK + 2 * CHUNK * kind.value_dim + 2 * kind.key_dim * kind.value_dim
    of_chunk = kind.value_heads * (pairs + 4 * CHUNK) * FLOAT + kind.key_heads * 2 * CHUNK * kind.key_dim * FLOAT
    states = kind.value_heads * kind.key_dim * kind.value_dim * FLOAT
    return of_chunk // CHUNK, of_chunk * STATE_BYTES // states
