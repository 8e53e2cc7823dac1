"""Batch-invariant passes: the results of a token depend on what it sees alone, to the last bit.

Libraries sum matrix products of different sizes in different orders, and so round differently. So the tokens of a pass
are computed in tiles of one size, each of one model, the last ones filled up: where in a tile a token lies changes
nothing. Attention has an order of its own (`models/attention.py`). Sampling and the logprobs of training are computed
so; gradients are not.

It costs time: a tile takes as long with one token as with all, and training computes logprobs apart from gradients.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from tinsmith.errors import ConfigError
from tinsmith.models.attention import PassPlan
from tinsmith.models.decoder import AttentionBlock, Decoder, Deepstack, ExpertMLP, Pass
from tinsmith.models.lora import Adapter, Segment
from tinsmith.models.packed_lora import SegmentAdapters


def tile_rows(device: torch.device) -> int:
    """Tokens of a tile: on a GPU as many as it computes in the time of one."""
    return 128 if device.type == "cuda" else 16


class TokenTiles:
    """The tokens of a packed row in tiles of one size and one adapter each."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        rows = tile_rows(device)
        self.adapters: list[Adapter | None] = []
        """The adapter of each tile."""
        places: list[Tensor] = []
        for segment in segments:
            length = segment.end - segment.start
            places.append(torch.arange(length) + len(self.adapters) * rows)
            self.adapters += [segment.adapter] * -(-length // rows)
        self.rows = rows
        self.places = torch.cat(places).to(device)
        """[tokens]: where each lies among the rows of all tiles."""

    def cut(self, x: Tensor) -> tuple[Tensor, ...]:
        """Cut x [tokens, ...] into tiles filled up with zeros."""
        laid_out = x.new_zeros(len(self.adapters) * self.rows, *x.shape[1:]).index_copy_(0, self.places, x)
        tiles: tuple[Tensor, ...] = laid_out.split(self.rows)
        return tiles

    def join(self, tiles: Sequence[Tensor]) -> Tensor:
        """[tokens, ...] of tiles, without what fills them up."""
        return torch.cat(list(tiles)).index_select(0, self.places)


@torch.no_grad()
def stable_hidden_states(
    decoder: Decoder,
    embeddings: Tensor,
    positions: Tensor,
    plan: PassPlan,
    segments: Sequence[Segment],
    deepstack: Deepstack | None,
) -> Tensor:
    """Compute `Decoder.forward` tile by tile, with attention in a fixed order. For decoders whose layers all attend."""
    tiles = TokenTiles(segments, embeddings.device)
    shared = [
        Pass(plan, SegmentAdapters([Segment(0, tiles.rows, adapter)]), *decoder.rope.angles(where.t()), None)
        for adapter, where in zip(tiles.adapters, tiles.cut(positions.t().contiguous()), strict=True)
    ]
    xs: Sequence[Tensor] = tiles.cut(embeddings)
    deltas: Sequence[Tensor | None] = [None] * len(xs)
    for layer in decoder.layers:
        block = layer.block
        assert isinstance(block, AttentionBlock), "require_attention_only"
        entered = [
            block.enter(x, delta, layer.first_norm, own) for x, delta, own in zip(xs, deltas, shared, strict=True)
        ]
        query, key, value = (tiles.join([parts[number] for parts in entered]) for number in (1, 2, 3))
        outs = tiles.cut(block.attend(plan, query, key, value))
        found = [
            layer.mlp(parts[0], block.leave(out, parts[4:], own), layer.second_norm, own)
            for parts, out, own in zip(entered, outs, shared, strict=True)
        ]
        xs = [x for x, _ in found]
        together = torch.cat([delta for _, delta in found])  # [rows of all tiles, hidden]
        if deepstack is not None and block.index < len(deepstack.features):
            together.index_add_(0, tiles.places[deepstack.index], deepstack.features[block.index])
        deltas = together.split(tiles.rows)
    return tiles.join([decoder.finish(x, delta) for x, delta in zip(xs, deltas, strict=True)])


@torch.no_grad()
def stable_logits(hidden: Tensor, lm_head: Tensor, a: Tensor | None, b: Tensor | None, scale: float) -> Tensor:
    """Logits [tokens, vocabulary] of one model's tokens, hidden [tokens, hidden], tile by tile."""
    if not len(hidden):
        return hidden.new_empty(0, len(lm_head))
    tiles = TokenTiles([Segment(0, len(hidden), None)], hidden.device)
    found = []
    for tile in tiles.cut(hidden):
        logits = linear(tile, lm_head)
        if a is not None and b is not None:
            logits.addmm_(linear(tile, a), b.t(), alpha=scale)
        found.append(logits)
    return tiles.join(found)


def require_attention_only(name: str, decoder: Decoder | None) -> None:
    """Raise ConfigError unless all layers of a model are known and attend."""
    remedy = "leave out --deterministic, or serve another model"
    if decoder is None:
        raise ConfigError(f"deterministic: {name} has a decoder whose layers run through transformers; {remedy}")
    others = [layer.block.index for layer in decoder.layers if not isinstance(layer.block, AttentionBlock)]
    if others:
        raise ConfigError(
            f"deterministic: {name} has gated delta nets (layers {others[0]} and others), "
            f"which are not computed so; {remedy}"
        )
    if any(isinstance(layer.mlp, ExpertMLP) for layer in decoder.layers):
        raise ConfigError(f"deterministic: {name} has mixtures of experts, which are not computed so; {remedy}")


class _Instead(torch.autograd.Function):
    """The second tensor, with the gradient of the first."""

    @staticmethod
    def forward(ctx: object, learned: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def instead(learned: Tensor, value: Tensor) -> Tensor:
    """`value`, whose gradient goes to `learned`, which is the same but for its rounding."""
    compute: Callable[..., Tensor] = _Instead.apply
    return compute(learned, value)
