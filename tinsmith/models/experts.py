"""Mixtures of experts over packed rows, with LoRA whose matrices on the hidden side are shared by all experts.

A router sends each token to a few experts. A token and one of its experts are a *pair*. Pairs lie in the order of their
experts, and of their adapters within an expert: so the base's products are one grouped product, and those of all
adapters another (`grouped_product.py`). The weighted outputs of a token's pairs are added up.

    gate = W_gate[e] h + scale · B_gate[e] (A_gate h)                         and up likewise
    out  = Σ_e w[e] · W_down[e] a[e]  +  scale · B_down Σ_e w[e] · A_down[e] a[e],      a[e] = silu(gate) · up

The shared matrices A_gate, A_up and B_down are multiplied once a token, before it is copied to its experts and after
their sum.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, softmax

from tinsmith.models.fused import swiglu, swiglu_backward
from tinsmith.models.grouped_product import grouped_product, outer_product, transposed_product
from tinsmith.models.layers import Experts
from tinsmith.models.lora import ExpertFactors, Segment, experts_of

RANKS = 8
"""Ranks are padded to multiples of it: grouped products in half precision read 16 bytes at a time."""


@dataclass(frozen=True, eq=False)
class ExpertStack:
    """The weights of a mixture of experts and of its router."""

    name: str
    """Inside the language model."""
    kind: Experts
    names: tuple[str, str, str]
    """Names of the three parameters inside the language model."""
    router: Tensor
    """[experts, hidden]"""
    gate_up: Tensor
    """[experts, 2 · width, hidden]"""
    down: Tensor
    """[experts, hidden, width]"""

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "ExpertStack":
        """Use these parameters, by name, in the place of its own."""
        own = (self.router, self.gate_up, self.down)
        router, gate_up, down = (parameters.get(name, held) for name, held in zip(self.names, own, strict=True))
        return replace(self, router=router, gate_up=gate_up, down=down)

    def route(self, h: Tensor, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Choose experts of tokens h [tokens, hidden] as transformers does: weights and numbers [tokens, per_token].

        `choose` may put others in their place; their weights are what the router gives these.
        """
        probabilities = softmax(linear(h, self.router), dim=-1, dtype=torch.float32)
        chosen = choose(probabilities.topk(self.kind.per_token, dim=-1).indices)
        weights = probabilities.gather(1, chosen)
        if self.kind.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(h.dtype), chosen


class Pairs(NamedTuple):
    """Pairs of a token and one of its experts, in order of their experts, and within these of the tokens' owners.

    The owner of a token is its adapter, or the base.
    """

    per_token: int
    order: Tensor
    """[pairs] int64: the number of each among the pairs of the first token, those of the second, and so on."""
    tokens: Tensor
    """[pairs] int64: the token of each."""
    places: Tensor
    """[pairs] int64: the inverse of `order`."""
    expert_ends: Tensor
    """[experts] int32: behind which pair each expert ends."""
    ends: Tensor
    """[experts · owners] int32: behind which pair each owner of each expert ends."""

    def copied(self, of_tokens: Tensor) -> Tensor:
        """Copy rows of tokens [tokens, width] to their pairs [pairs, width]."""
        return of_tokens.index_select(0, self.tokens)

    def summed(self, of_pairs: Tensor) -> Tensor:
        """Add up the rows of pairs [pairs, width] of each token [tokens, width]."""
        total: Tensor = of_pairs.index_select(0, self.places).view(-1, self.per_token, of_pairs.shape[1]).sum(1)
        return total

    def weights(self, of_tokens: Tensor) -> Tensor:
        """Put the router's weights [tokens, per_token] in order: [pairs, 1]."""
        return of_tokens.flatten().index_select(0, self.order).unsqueeze(1)


def pairs_of(kind: Experts, chosen: Tensor, owner: Tensor | None, owners: int) -> Pairs:
    """Put the pairs of tokens in order; `chosen` are the numbers of their experts, [tokens, per_token].

    `owner` [tokens] int64 says which of the `owners` a token has; None if there is one. Waits for no device.
    """
    groups = (chosen if owner is None else chosen * owners + owner.unsqueeze(1)).flatten()
    order = groups.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(kind.count * owners, dtype=torch.int32, device=order.device)
    ends = counts.scatter_add_(0, groups, torch.ones_like(groups, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    tokens = order.div(kind.per_token, rounding_mode="floor")
    return Pairs(kind.per_token, order, tokens, places, ends[owners - 1 :: owners].contiguous(), ends)


class Owners(NamedTuple):
    """Whose the tokens of a packed row are."""

    factors: tuple[tuple[ExpertFactors, float] | None, ...]
    """Of each owner the matrices of its adapter for a mixture of experts, and their scale; None for the base."""
    spans: tuple[tuple[int, int, int], ...]
    """Slices [start, end) of the row, which cover it, and the number of the owner of each."""
    of_tokens: Tensor | None
    """[tokens] int64: the same of each token; None if there is one owner."""


def mix(stack: ExpertStack, h: Tensor, weights: Tensor, chosen: Tensor, owners: Owners) -> Tensor:
    """Compute the experts of tokens h [tokens, hidden] with the adapters of a packed row. Differentiable.

    `weights` and `chosen` are those of `ExpertStack.route`.
    """
    pairs = pairs_of(stack.kind, chosen, owners.of_tokens, len(owners.factors))
    compute: Any = _Mixed.apply
    found = [own for own in owners.factors if own is not None]
    if not found:
        out: Tensor = compute(pairs, h, weights, stack.gate_up, stack.down)[0]
        return out
    rank = -(-max(factors.rank for factors, _ in found) // RANKS) * RANKS
    own = (_stacked(owners, number, rank) for number in range(3))
    out, inside = compute(pairs, h, weights, stack.gate_up, stack.down, _reduced(h, owners, rank), *own)
    return _added(out, inside, owners)


class _Mixed(torch.autograd.Function):
    """Computes pairs, and keeps of them what goes into their activation alone.

    Inputs: h [tokens, hidden], the router's weights [tokens, per_token], gate_up and down of the stack. With adapters
    also h behind the A's of gate and up [tokens, 2 · rank], and the matrices that experts have of their own: B's of
    gate and of up [experts · owners, width, rank], and A's of down [experts · owners, rank, width].

    Results: the sum of each token's experts [tokens, hidden], and with adapters the same behind the A's of down
    [tokens, rank].
    """

    @staticmethod
    def forward(
        ctx: Any, pairs: Pairs, h: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *lora: Tensor
    ) -> tuple[Tensor, ...]:
        inner = grouped_product(pairs.copied(h), gate_up, pairs.expert_ends)  # [pairs, 2 · width]
        if lora:
            reduced, b_gate, b_up, _ = lora
            for part, own, u in zip(inner.chunk(2, 1), (b_gate, b_up), pairs.copied(reduced).chunk(2, 1), strict=True):
                part += grouped_product(u, own, pairs.ends)
        activated = swiglu(inner)  # [pairs, width]
        of_pairs = pairs.weights(weights)
        out = pairs.summed(grouped_product(activated, down, pairs.expert_ends) * of_pairs)
        ctx.per_token = pairs.per_token
        ctx.save_for_backward(*pairs[1:], inner, h, weights, gate_up, down, *lora)
        if not lora:
            return (out,)
        return out, pairs.summed(grouped_product(activated, lora[3], pairs.ends) * of_pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        order, tokens, places, expert_ends, ends, inner, h, weights, gate_up, down, *lora = ctx.saved_tensors
        pairs = Pairs(ctx.per_token, order, tokens, places, expert_ends, ends)
        _, wants_h, wants_weights, wants_gate_up, wants_down, *_ = ctx.needs_input_grad
        of_pairs = pairs.weights(weights)
        d_out = pairs.copied(grads[0])  # [pairs, hidden], without the router's weight, as all until `d_activated`
        d = transposed_product(d_out, down, pairs.expert_ends)  # [pairs, width]
        if lora:
            reduced, b_gate, b_up, a_down = lora
            d_inside = pairs.copied(grads[1])  # [pairs, rank]
            d += transposed_product(d_inside, a_down, pairs.ends)
        # What an expert makes of its activation is weighted alike with A and without: so the gradient of its weight is
        # the product of the activation and its gradient.
        d_inner, activated = swiglu_backward(inner, d * of_pairs)
        d_weights = (d * activated).sum(-1)[pairs.places].view_as(weights) if wants_weights else None
        d_h = pairs.summed(transposed_product(d_inner, gate_up, pairs.expert_ends)) if wants_h else None
        d_gate_up = outer_product(d_inner, pairs.copied(h), gate_up, pairs.expert_ends) if wants_gate_up else None
        d_down = outer_product(d_out * of_pairs, activated, down, pairs.expert_ends) if wants_down else None
        found: list[Tensor | None] = [None, d_h, d_weights, d_gate_up, d_down]
        if lora:
            d_gate, d_up = (part.contiguous() for part in d_inner.chunk(2, 1))
            u_gate, u_up = pairs.copied(reduced).chunk(2, 1)
            d_reduced = [transposed_product(part, own, pairs.ends) for part, own in ((d_gate, b_gate), (d_up, b_up))]
            found += [
                pairs.summed(torch.cat(d_reduced, 1)),
                outer_product(d_gate, u_gate, b_gate, pairs.ends),
                outer_product(d_up, u_up, b_up, pairs.ends),
                outer_product(d_inside * of_pairs, activated, a_down, pairs.ends),
            ]
        return tuple(found)


def mix_bare(stack: ExpertStack, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Compute the experts of tokens h [tokens, hidden] without adapters."""
    return mix(stack, h, weights, chosen, Owners((None,), ((0, len(h), 0),), None))


def _reduced(h: Tensor, owners: Owners, rank: int) -> Tensor:
    """Multiply tokens with the A's of gate and up of their owners: [tokens, 2 · rank], zeros behind a lower rank."""
    found = []
    for start, end, owner in owners.spans:
        if (own := owners.factors[owner]) is None:
            found.append(h.new_zeros(end - start, 2 * rank))
            continue
        factors, scale = own
        of_both = linear(h[start:end], torch.cat([factors.gate.a, factors.up.a])).unflatten(1, (2, factors.rank))
        found.append(pad(of_both * scale, (0, rank - factors.rank)).flatten(1))
    return torch.cat(found)


def _stacked(owners: Owners, number: int, rank: int) -> Tensor:
    """The matrices that experts have of their own of gate (0), up (1) or down (2): [experts · owners, out, in].

    `rank` is the last dimension of those of gate and up, and the middle one of those of down.
    """
    some = next(own[0] for own in owners.factors if own is not None)
    like = some.own(number)
    found = []
    for own in owners.factors:
        if own is None:
            shape = (len(like), rank, like.shape[2]) if number == 2 else (len(like), like.shape[1], rank)
            found.append(like.new_zeros(shape))
        else:
            missing = rank - own[0].rank
            sides = (0, 0, 0, missing) if number == 2 else (0, missing)
            matrices = own[0].own(number)
            if missing or len(owners.factors) > 1:
                compute: Any = _WithOwnGradient.apply
                matrices = compute(matrices)
            if missing:
                matrices = pad(matrices, sides)
            found.append(matrices)
    return found[0] if len(found) == 1 else torch.stack(found, 1).flatten(0, 1)


class _WithOwnGradient(torch.autograd.Function):
    """A matrix whose gradient is no view: otherwise the padded ones of all owners live as long as one of them."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        return matrix.view_as(matrix)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return (grads[0].clone(memory_format=torch.contiguous_format),)


def _added(out: Tensor, inside: Tensor, owners: Owners) -> Tensor:
    """Add what the adapters' B's of down make of `inside` [tokens, rank] to `out` [tokens, hidden]."""
    found = []
    for start, end, owner in owners.spans:
        mine = out[start:end]
        if (own := owners.factors[owner]) is not None:
            factors, scale = own
            mine = torch.addmm(mine, inside[start:end, : factors.rank], factors.down.b.t(), alpha=scale)
        found.append(mine)
    return torch.cat(found)


def owners_of(name: str, segments: Sequence[Segment], known: dict[tuple[int, ...], Tensor], like: Tensor) -> Owners:
    """Return whose the tokens of a row are for a mixture of experts.

    Adapters count once, however many segments they have. What covers no experts is one owner, with the base. `known`
    are the numbers of tokens by those of their segments: they are made on the device of `like`, and all layers use
    them.
    """
    numbers: dict[int, int] = {}
    factors: list[tuple[ExpertFactors, float] | None] = []
    spans = []
    for segment in segments:
        adapter = segment.adapter
        own = None if adapter is None else experts_of(adapter, name)
        owner = 0 if own is None else id(adapter)
        if owner not in numbers:
            numbers[owner] = len(factors)
            factors.append(None if adapter is None or own is None else (own, adapter.scale))
        spans.append((segment.start, segment.end, numbers[owner]))
    if len(factors) == 1:
        return Owners(tuple(factors), tuple(spans), None)
    key = tuple(number for _, _, number in spans)
    if key not in known:
        known[key] = torch.cat([torch.full((end - start,), number, device=like.device) for start, end, number in spans])
    return Owners(tuple(factors), tuple(spans), known[key])
