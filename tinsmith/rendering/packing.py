"""Packs rendered sequences into one row, sorted by owner, with the images of all of them beside it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tinsmith.kernels.device import upload
from tinsmith.models.base import PackedRow
from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.grouped_product import MOST_GROUPS
from tinsmith.models.layout import Layout
from tinsmith.models.lora import Adapter, Segment
from tinsmith.rendering.rendered import RenderedInput


def packing_order(lengths: Sequence[int], owners: Sequence[Weights | None]) -> list[int]:
    """Return the order to pack in: by owner, then by length, so that equal lengths can share an attention call."""
    rank: dict[int, int] = {}
    for owner in owners:
        rank.setdefault(id(owner), len(rank))
    return sorted(range(len(lengths)), key=lambda i: (rank[id(owners[i])], lengths[i]))


def shared_rows(owners: Sequence[Weights | None], layout: Layout) -> list[list[int]]:
    """Group the owners (indices, in order) that may share a row of a base of this layout.

    Adapters and the bare base may, as many as `most_owners` says; each model with full weights is alone.
    """
    most, numbers = most_owners(layout), dict[int, int]()
    rows: dict[tuple[int, int], list[int]] = {}
    for index, owner in enumerate(owners):
        if isinstance(owner, FullWeights):
            row = id(owner), 0
        else:
            row = 0, numbers.setdefault(id(owner), len(numbers)) // most
        rows.setdefault(row, []).append(index)
    return list(rows.values())


def most_owners(layout: Layout) -> int:
    """The most adapters of a row, the base included: in a mixture of experts each is a group of each expert."""
    return max(1, MOST_GROUPS // max((kind.count for kind in layout.experts.values()), default=1))


def pack(sequences: Sequence[RenderedInput], owners: Sequence[Weights | None], device: torch.device) -> PackedRow:
    """Pack `sequences` of one of `shared_rows`, in an order that keeps each owner's together (`packing_order`)."""
    lengths = [len(s) for s in sequences]
    in_images = ~np.concatenate([s.is_text for s in sequences])  # [tokens]
    return PackedRow(
        token_ids=upload(np.concatenate([s.token_ids for s in sequences], dtype=np.int64), device),
        positions=upload(torch.cat([s.positions for s in sequences], dim=1).numpy(), device),
        lengths=lengths,
        segments=segments_of(lengths, owners),
        image_index=upload(np.flatnonzero(in_images), device),
        images=[image for s in sequences for image in s.images],
        full=owners[0] if isinstance(owners[0], FullWeights) else None,
        routes=_routes(sequences, device),
    )


def _routes(sequences: Sequence[RenderedInput], device: torch.device) -> Tensor | None:
    """Join the experts to follow; sequences that have none choose theirs."""
    given = next((s.routes for s in sequences if s.routes is not None), None)
    if given is None:
        return None
    mixtures, _, per_token = given.shape
    free = (
        np.full((mixtures, len(s), per_token), -1, dtype=np.int16) if s.routes is None else s.routes for s in sequences
    )
    return upload(np.concatenate(list(free), axis=1), device)


def segments_of(lengths: Sequence[int], owners: Sequence[Weights | None]) -> list[Segment]:
    """Join neighbouring sequences of the same adapter into segments that cover the row; full weights are no adapter."""
    segments: list[Segment] = []
    start = 0
    for length, owner in zip(lengths, owners, strict=True):
        adapter = owner if isinstance(owner, Adapter) else None
        end = start + length
        if segments and segments[-1].adapter is adapter:
            segments[-1] = Segment(segments[-1].start, end, adapter)
        else:
            segments.append(Segment(start, end, adapter))
        start = end
    return segments
