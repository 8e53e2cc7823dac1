"""Mixtures of experts over packed rows, with LoRA whose matrices on the hidden side are shared by all experts.

A router sends each token to a few experts. A token and one of its experts are a *pair*. Pairs lie in the order of their
experts, and of their adapters within an expert: so the base's products are one grouped product, and those of all
adapters another (`grouped_product.py`). The weighted outputs of a token's pairs are added up.

    gate = W_gate[e] h + scale · B_gate[e] (A_gate h)                         and up likewise
    out  = Σ_e w[e] · W_down[e] a[e]  +  scale · B_down Σ_e w[e] · A_down[e] a[e],      a[e] = silu(gate) · up

The shared matrices A_gate, A_up and B_down are multiplied once a token, before it is copied to its experts and after
their sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, softmax

from tinsmith.models.fused import swiglu, swiglu_backward
from tinsmith.models.grouped_product import grouped_product
from tinsmith.models.layers import Experts
from tinsmith.models.lora import ExpertFactors, Segment

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

    def route(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts of tokens h [tokens, hidden] as transformers does: weights and numbers [tokens, per_token]."""
        probabilities = softmax(linear(h, self.router), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.kind.per_token, dim=-1)
        if self.kind.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(h.dtype), chosen


class Pairs(NamedTuple):
    """Pairs of a token and one of its experts, in order of their experts, and within these of the tokens' owners.

    The owner of a token is its adapter, or the base.
    """

    per_token: int
    tokens: Tensor
    """[pairs] int64: the token of each."""
    places: Tensor
    """[pairs] int64: where the pairs of the first token are, then those of the second, and so on."""
    weights: Tensor
    """[pairs, 1]: what the router gave them."""
    expert_ends: Tensor
    """[experts] int32: behind which pair each expert ends."""
    ends: Tensor
    """[experts · owners] int32: behind which pair each owner of each expert ends."""

    def copied(self, of_tokens: Tensor) -> Tensor:
        """Copy rows of tokens [tokens, width] to their pairs [pairs, width]."""
        compute: Any = _Copied.apply
        result: Tensor = compute(self, of_tokens)
        return result

    def summed(self, of_pairs: Tensor) -> Tensor:
        """Add up the rows of pairs [pairs, width] of each token [tokens, width]."""
        compute: Any = _Summed.apply
        result: Tensor = compute(self, of_pairs)
        return result


class _Copied(torch.autograd.Function):
    """Its backward adds in a fixed order, unlike that of `index_select` on a GPU."""

    @staticmethod
    def forward(ctx: Any, pairs: Pairs, of_tokens: Tensor) -> Tensor:
        ctx.pairs = pairs
        return of_tokens.index_select(0, pairs.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, _sum(ctx.pairs, grads[0])


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pairs: Pairs, of_pairs: Tensor) -> Tensor:
        ctx.pairs = pairs
        return _sum(pairs, of_pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pairs: Pairs = ctx.pairs
        return None, grads[0].index_select(0, pairs.tokens)


def _sum(pairs: Pairs, of_pairs: Tensor) -> Tensor:
    return of_pairs.index_select(0, pairs.places).unflatten(0, (-1, pairs.per_token)).sum(1)


class _SwiGLU(torch.autograd.Function):
    """Keeps its input alone for the backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (swiglu_backward(ctx.saved_tensors[0], grads[0])[0],)


def pairs_of(kind: Experts, weights: Tensor, chosen: Tensor, owner: Tensor | None, owners: int) -> Pairs:
    """Put the pairs of tokens in order; weights and numbers of experts are [tokens, per_token].

    `owner` [tokens] int64 says which of the `owners` a token has; None if there is one. Waits for no device.
    """
    groups = chosen if owner is None else chosen * owners + owner.unsqueeze(1)
    groups = groups.flatten()
    order = groups.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(kind.count * owners, dtype=torch.int32, device=order.device)
    ends = counts.scatter_add_(0, groups, torch.ones_like(groups, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    return Pairs(
        per_token=kind.per_token,
        tokens=order.div(kind.per_token, rounding_mode="floor"),
        places=places,
        weights=weights.flatten().index_select(0, order).unsqueeze(1),
        expert_ends=ends[owners - 1 :: owners].contiguous(),
        ends=ends,
    )


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
    pairs = pairs_of(stack.kind, weights, chosen, owners.of_tokens, len(owners.factors))
    gate_up = grouped_product(pairs.copied(h), stack.gate_up, pairs.expert_ends)  # [pairs, 2 · width]
    found = [own for own in owners.factors if own is not None]
    if not found:
        activated = _activated(gate_up)
        return pairs.summed(grouped_product(activated, stack.down, pairs.expert_ends) * pairs.weights)
    rank = -(-max(factors.rank for factors, _ in found) // RANKS) * RANKS
    reduced = pairs.copied(_reduced(h, owners, rank)).unflatten(1, (2, rank))  # [pairs, 2, rank]
    of_each = [
        grouped_product(reduced[:, number], _stacked(owners, number, rank), pairs.ends) for number in (0, 1)
    ]  # gate, up
    activated = _activated(gate_up + torch.cat(of_each, 1))  # [pairs, width]
    out = pairs.summed(grouped_product(activated, stack.down, pairs.expert_ends) * pairs.weights)
    inside = grouped_product(activated, _stacked(owners, 2, rank), pairs.ends)  # [pairs, rank]
    return _added(out, pairs.summed(inside * pairs.weights), owners)


def mix_bare(stack: ExpertStack, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Compute the experts of tokens h [tokens, hidden] without adapters."""
    return mix(stack, h, weights, chosen, Owners((None,), ((0, len(h), 0),), None))


def _activated(gate_up: Tensor) -> Tensor:
    compute: Any = _SwiGLU.apply
    result: Tensor = compute(gate_up)
    return result


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
            found.append(pad(own[0].own(number), sides) if missing else own[0].own(number))
    return found[0] if len(found) == 1 else torch.stack(found, 1).flatten(0, 1)


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


def owners_of(name: str, segments: Sequence[Segment], of_tokens: Tensor | None) -> Owners:
    """Return whose the tokens of a row are for a mixture of experts: adapters count once, however many segments."""
    numbers: dict[int, int] = {}
    factors: list[tuple[ExpertFactors, float] | None] = []
    spans = []
    for segment in segments:
        adapter = segment.adapter
        if id(adapter) not in numbers:
            numbers[id(adapter)] = len(factors)
            own = None if adapter is None else adapter.experts(name)
            factors.append(None if adapter is None or own is None else (own, adapter.scale))
        spans.append((segment.start, segment.end, numbers[id(adapter)]))
    return Owners(tuple(factors), tuple(spans), of_tokens)


def owner_of_tokens(segments: Sequence[Segment], device: torch.device) -> Tensor | None:
    """Number the adapter of each token, in the order of `owners_of`: [tokens] int64; None if there is one."""
    numbers: dict[int, int] = {}
    for segment in segments:
        numbers.setdefault(id(segment.adapter), len(numbers))
    if len(numbers) < 2:
        return None
    return torch.cat(
        [
            torch.full((segment.end - segment.start,), numbers[id(segment.adapter)], device=device)
            for segment in segments
        ]
    )
