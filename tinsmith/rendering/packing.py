"""Rendered sequences -> one packed row, sorted by adapter, with the pictures of all of them beside it."""

from collections.abc import Sequence

import numpy as np
import torch

from tinsmith.models.base import PackedRow
from tinsmith.models.lora import Adapter, Segment
from tinsmith.rendering.rendered import RenderedInput


def packing_order(lengths: Sequence[int], adapters: Sequence[Adapter | None]) -> list[int]:
    """The order in which to pack: by adapter (first come first), inside it by length, so that equal lengths can share an attention call."""
    rank: dict[int, int] = {}
    for adapter in adapters:
        rank.setdefault(id(adapter), len(rank))
    return sorted(range(len(lengths)), key=lambda i: (rank[id(adapters[i])], lengths[i]))


def pack(sequences: Sequence[RenderedInput], adapters: Sequence[Adapter | None], device: torch.device) -> PackedRow:
    """One row of `sequences` in the given order, which must keep each adapter's sequences together (`packing_order`)."""
    lengths = [len(s) for s in sequences]
    starts = [0, *np.cumsum(lengths).tolist()]
    places = [
        np.arange(start + span.offset, start + span.offset + span.length)
        for start, s in zip(starts, sequences, strict=False)
        for span in s.spans
    ]
    return PackedRow(
        token_ids=torch.from_numpy(np.concatenate([s.token_ids for s in sequences])).to(device, torch.int64),
        positions=torch.cat([s.positions for s in sequences], dim=1).to(device),
        lengths=lengths,
        segments=segments_of(lengths, adapters),
        picture_index=torch.from_numpy(np.concatenate(places) if places else np.empty(0, np.int64)).to(device),
        pictures=[picture for s in sequences for picture in s.pictures],
    )


def segments_of(lengths: Sequence[int], adapters: Sequence[Adapter | None]) -> list[Segment]:
    """Join neighbouring sequences of the same adapter into segments that cover the row."""
    segments: list[Segment] = []
    start = 0
    for length, adapter in zip(lengths, adapters, strict=True):
        end = start + length
        if segments and segments[-1].adapter is adapter:
            segments[-1] = Segment(segments[-1].start, end, adapter)
        else:
            segments.append(Segment(start, end, adapter))
        start = end
    return segments
