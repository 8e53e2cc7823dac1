"""Mixtures of experts over packed rows, with LoRA whose matrices on the hidden side are shared by all experts.

A router sends each token to a few experts. A token and one of its experts are a *pair*. Pairs lie in the order of their
experts, and of their adapters within an expert: so the base's products are one grouped product, and those of all
adapters another (`grouped_product.py`). The weighted outputs of a token's pairs are added up.

    gate = W_gate[e] h + scale · B_gate[e] (A_gate h)                         and up likewise
    out  = Σ_e w[e] · W_down[e] a[e]  +  scale · B_down Σ_e w[e] · A_down[e] a[e],      a[e] = silu(gate) · up

The shared matrices A_gate, A_up and B_down are multiplied once a token, before it is copied to its experts and after
their sum. Where experts have biases, those of gate and up are added before the activation, and those of down, weighted,
to the sum.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, softmax

from tinsmith.models.fused import clamped_swiglu, clamped_swiglu_backward, swiglu, swiglu_backward
from tinsmith.models.grouped_product import grouped_product, outer_product, transposed_product
from tinsmith.models.layers import Experts
from tinsmith.models.lora import ExpertFactors, Segment, experts_of
from tinsmith.models.quantized import Matrices

RANKS = 8
"""Ranks are padded to multiples of it: grouped products in half precision read 16 bytes at a time."""


class ExpertBiases(NamedTuple):
    """The biases of a mixture of experts and of its router."""

    router: Tensor
    """[experts]"""
    gate_up: Tensor
    """[experts, 2 · width]"""
    down: Tensor
    """[experts, hidden]"""


@dataclass(frozen=True, eq=False)
class ExpertStack:
    """The weights of a mixture of experts and of its router, as transformers has them."""

    name: str
    """Inside the language model."""
    kind: Experts
    names: tuple[str, ...]
    """Names of the `parameters` inside the language model."""
    router: Tensor
    """[experts, hidden]"""
    gate_up: Matrices
    """[experts, 2 · width, hidden]; as a tensor [experts, hidden, 2 · width] if the kind is clamped"""
    down: Matrices
    """[experts, hidden, width]; as a tensor [experts, width, hidden] if the kind is clamped"""
    biases: ExpertBiases | None = None
    """None if there are none."""

    @property
    def parameters(self) -> tuple[Matrices, ...]:
        """The weights, and the biases if there are any."""
        return (self.router, self.gate_up, self.down, *(self.biases or ()))

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "ExpertStack":
        """Use these parameters, by name, in the place of its own."""
        router, gate_up, down, *biases = self.names
        return replace(
            self,
            router=parameters.get(router, self.router),
            gate_up=parameters.get(gate_up, self.gate_up),
            down=parameters.get(down, self.down),
            biases=self.biases
            and ExpertBiases(*(parameters.get(*own) for own in zip(biases, self.biases, strict=True))),
        )

    @property
    def matrices(self) -> tuple[Matrices, Matrices]:
        """Those of gate and up, and of down: [experts, out, in]."""
        gate_up, down = self.gate_up, self.down
        if self.kind.clamped is None or not (isinstance(gate_up, Tensor) and isinstance(down, Tensor)):
            return gate_up, down
        return gate_up.transpose(1, 2), down.transpose(1, 2)

    def route(self, h: Tensor, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Choose experts of tokens h [tokens, hidden] as transformers does: weights and numbers [tokens, per_token].

        `choose` may put others in their place; their weights are what the router gives these.
        """
        if self.biases is not None:
            scores = linear(h, self.router, self.biases.router)
            chosen = choose(scores.topk(self.kind.per_token, dim=-1).indices)
            return softmax(scores.gather(1, chosen), dim=-1), chosen
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


# What experts compute between their products


def gate_and_up(kind: Experts, gate_up: Tensor, dim: int = 1) -> tuple[Tensor, Tensor]:
    """Views of the outputs of gate and of up, among those of both in dimension `dim`."""
    if kind.clamped is None:
        gate, up = gate_up.chunk(2, dim)
        return gate, up
    gate, up = gate_up.unflatten(dim, (kind.width, 2)).unbind(dim + 1)
    return gate, up


def activate(kind: Experts, gate_up: Tensor) -> Tensor:
    """Compute the activation of gate_up [pairs, 2 · width]: [pairs, width]."""
    if kind.clamped is None:
        return swiglu(gate_up)
    return clamped_swiglu(gate_up, kind.clamped.alpha, kind.clamped.limit)


def activate_backward(kind: Experts, gate_up: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up [pairs, 2 · width], and what `activate` makes of it again."""
    if kind.clamped is None:
        return swiglu_backward(gate_up, d_out)
    return clamped_swiglu_backward(gate_up, d_out, kind.clamped.alpha, kind.clamped.limit)


def enter_experts(pairs: Pairs, chosen: Tensor, h: Tensor, gate_up: Matrices, bias: Tensor | None) -> Tensor:
    """Multiply tokens h [tokens, hidden] with gate and up of their experts, and add the biases: [pairs, 2 · width]."""
    inner = grouped_product(pairs.copied(h), gate_up, pairs.expert_ends)
    return inner if bias is None else inner.addmm_(_one_hot(pairs, chosen, bias), bias)


def _one_hot(pairs: Pairs, chosen: Tensor, bias: Tensor) -> Tensor:
    """[pairs, experts]: ones at their experts, in the precision of `bias` [experts, ...]."""
    numbers = chosen.flatten().index_select(0, pairs.order).unsqueeze(1)
    return bias.new_zeros(len(numbers), len(bias)).scatter_(1, numbers, 1)


def with_biases(stack: ExpertStack, out: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Add the biases of down, weighted, to the sums of experts [tokens, hidden], if there are any."""
    if stack.biases is None:
        return out
    bias = stack.biases.down
    return torch.addmm(out, weights.new_zeros(len(weights), len(bias)).scatter(1, chosen, weights), bias)


def mix(stack: ExpertStack, h: Tensor, weights: Tensor, chosen: Tensor, owners: Owners) -> Tensor:
    """Compute the experts of tokens h [tokens, hidden] with the adapters of a packed row. Differentiable.

    `weights` and `chosen` are those of `ExpertStack.route`.
    """
    pairs = pairs_of(stack.kind, chosen, owners.of_tokens, len(owners.factors))
    compute: Any = _Mixed.apply
    found = [own for own in owners.factors if own is not None]
    bias = None if stack.biases is None else stack.biases.gate_up
    given = (stack.kind, pairs, chosen, h, weights, *stack.matrices, bias)
    if not found:
        return with_biases(stack, compute(*given)[0], weights, chosen)
    rank = -(-max(factors.rank for factors, _ in found) // RANKS) * RANKS
    own = (_stacked(owners, number, rank) for number in range(3))
    out, inside = compute(*given, _reduced(h, owners, rank), *own)
    return _added(with_biases(stack, out, weights, chosen), inside, owners)


class _Mixed(torch.autograd.Function):
    """Computes pairs, and keeps of them what goes into their activation alone.

    Inputs: the numbers of experts and the router's weights [tokens, per_token], h [tokens, hidden], the matrices of the
    stack and the bias of gate and up, if there is one. With adapters also h behind the A's of gate and up
    [tokens, 2 · rank], and the matrices that experts have of their own: B's of gate and of up
    [experts · owners, width, rank], and A's of down [experts · owners, rank, width].

    Results: the sum of each token's experts [tokens, hidden], and with adapters the same behind the A's of down
    [tokens, rank].
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: Experts,
        pairs: Pairs,
        chosen: Tensor,
        h: Tensor,
        weights: Tensor,
        gate_up: Matrices,
        down: Matrices,
        bias: Tensor | None,
        *lora: Tensor,
    ) -> tuple[Tensor, ...]:
        inner = enter_experts(pairs, chosen, h, gate_up, bias)
        if lora:
            reduced, b_gate, b_up, _ = lora
            of_both = zip(gate_and_up(kind, inner), (b_gate, b_up), pairs.copied(reduced).chunk(2, 1), strict=True)
            for part, own, u in of_both:
                part += grouped_product(u, own, pairs.ends)
        activated = activate(kind, inner)  # [pairs, width]
        of_pairs = pairs.weights(weights)
        out = pairs.summed(grouped_product(activated, down, pairs.expert_ends) * of_pairs)
        ctx.kind = kind
        # Tensors may be anybody's leaves; quantized matrices are never trained, nor do they change.
        ctx.quantized = [None if isinstance(own, Tensor) else own for own in (gate_up, down)]
        tensors = (own if isinstance(own, Tensor) else None for own in (gate_up, down))
        ctx.save_for_backward(*pairs[1:], chosen, inner, h, weights, *tensors, bias, *lora)
        if not lora:
            return (out,)
        return out, pairs.summed(grouped_product(activated, lora[3], pairs.ends) * of_pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kind: Experts = ctx.kind
        saved = ctx.saved_tensors  # asked for once: a layer that is recomputed gives them once
        pairs = Pairs(kind.per_token, *saved[:5])
        chosen, inner, h, weights, gate_up, down, bias, *lora = saved[5:]
        gate_up, down = (held if own is None else own for own, held in zip(ctx.quantized, (gate_up, down), strict=True))
        wants_h, wants_weights, wants_gate_up, wants_down, wants_bias, *_ = ctx.needs_input_grad[3:]
        of_pairs = pairs.weights(weights)
        d_out = pairs.copied(grads[0])  # [pairs, hidden], without the router's weight, as all until `d_activated`
        d = transposed_product(d_out, down, pairs.expert_ends)  # [pairs, width]
        if lora:
            reduced, b_gate, b_up, a_down = lora
            d_inside = pairs.copied(grads[1])  # [pairs, rank]
            d += transposed_product(d_inside, a_down, pairs.ends)
        # What an expert makes of its activation is weighted alike with A and without: so the gradient of its weight is
        # the product of the activation and its gradient.
        d_inner, activated = activate_backward(kind, inner, d * of_pairs)
        d_weights = (d * activated).sum(-1)[pairs.places].view_as(weights) if wants_weights else None
        d_h = pairs.summed(transposed_product(d_inner, gate_up, pairs.expert_ends)) if wants_h else None
        d_gate_up = _stack_gradient(kind, d_inner, pairs.copied(h), gate_up, pairs) if wants_gate_up else None
        d_down = _stack_gradient(kind, d_out * of_pairs, activated, down, pairs) if wants_down else None
        d_bias = _one_hot(pairs, chosen, bias).t() @ d_inner if wants_bias else None
        found: list[Tensor | None] = [None, None, None, d_h, d_weights, d_gate_up, d_down, d_bias]
        if lora:
            d_gate, d_up = (part.contiguous() for part in gate_and_up(kind, d_inner))
            u_gate, u_up = pairs.copied(reduced).chunk(2, 1)
            d_reduced = [transposed_product(part, own, pairs.ends) for part, own in ((d_gate, b_gate), (d_up, b_up))]
            found += [
                pairs.summed(torch.cat(d_reduced, 1)),
                outer_product(d_gate, u_gate, b_gate, pairs.ends),
                outer_product(d_up, u_up, b_up, pairs.ends),
                outer_product(d_inside * of_pairs, activated, a_down, pairs.ends),
            ]
        return tuple(found)


def _stack_gradient(kind: Experts, y: Tensor, x: Tensor, like: Tensor, pairs: Pairs) -> Tensor:
    """The gradient of a stack's matrices [experts, out, in], laid out in memory as the parameter is."""
    if kind.clamped is None:
        return outer_product(y, x, like, pairs.expert_ends)
    return outer_product(x, y, like.transpose(1, 2), pairs.expert_ends).transpose(1, 2)


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

    `rank` is the last dimension of those of gate and up, and the middle one of those of down. Behind a lower rank, and
    for the base, are zeros.
    """
    found = [(place, own[0].own(number)) for place, own in enumerate(owners.factors) if own is not None]
    dim = 1 if number == 2 else 2
    if len(owners.factors) == 1 and found[0][1].shape[dim] == rank:
        return found[0][1]
    compute: Any = _Stacked.apply
    stacked: Tensor = compute(len(owners.factors), rank, dim, [place for place, _ in found], *(own for _, own in found))
    return stacked


class _Stacked(torch.autograd.Function):
    """Puts matrices of several owners beside each other, expert by expert.

    The gradient of a matrix is no view: otherwise the padded ones of all owners would live as long as one of them.
    """

    @staticmethod
    def forward(ctx: Any, owners: int, rank: int, dim: int, places: Sequence[int], *matrices: Tensor) -> Tensor:
        ctx.dim, ctx.owners, ctx.own = (
            dim,
            owners,
            [(place, own.shape[dim]) for place, own in zip(places, matrices, strict=True)],
        )
        shape = [*matrices[0].shape]
        shape[dim] = rank
        stacked = matrices[0].new_zeros(shape[0], owners, *shape[1:])
        for place, own in zip(places, matrices, strict=True):
            stacked[:, place].narrow(dim, 0, own.shape[dim]).copy_(own)
        return stacked.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_owners = grads[0].unflatten(0, (-1, ctx.owners))
        found = (
            of_owners[:, place].narrow(ctx.dim, 0, rank).clone(memory_format=torch.contiguous_format)
            for place, rank in ctx.own
        )
        return None, None, None, None, *found


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
