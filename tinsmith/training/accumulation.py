"""Adds the gradients of a pass to the accumulators in a way that cannot fail halfway.

A pass serves several models. If memory ran out while their gradients are added, the pass would be computed again and some gradients would
count twice. So everything that allocates is done when an `Addition` is made, and `add` only writes to tensors that are there.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

BUFFER_SIZE = 2**22
"""Numbers that are converted to float32 at a time: 16 MiB."""

Batch = tuple[list[Tensor], list[Tensor]]
"""Parts of the float32 totals, and of the gradients to add to them."""


class Addition:
    """The gradients of one pass for one model. Making it may run out of memory; `add` cannot."""

    def __init__(self, totals: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """`totals` are float32; gradients are of any precision. A GPU converts them as it adds; a CPU would take memory for that."""
        pairs = list(zip(totals, gradients, strict=True))
        self._whole = _batch([pair for pair in pairs if pair[1].dtype == torch.float32 or pair[1].is_cuda])
        converted = list(_batches([pair for pair in pairs if pair[1].dtype != torch.float32 and not pair[1].is_cuda]))
        size = max((sum(part.numel() for part in parts) for _, parts in converted), default=0)
        buffer = torch.empty(size, dtype=torch.float32, device=totals[0].device)
        self._converted = [(*batch, _views(buffer, batch[1])) for batch in converted]

    def add(self) -> None:
        """Add the gradients to the totals. Allocates nothing."""
        totals, gradients = self._whole
        if totals:
            torch._foreach_add_(totals, gradients)
        for parts, narrow, wide in self._converted:
            torch._foreach_copy_(wide, narrow)
            torch._foreach_add_(parts, wide)


def apart(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers, each tensor alone in its memory: autograd may give one tensor for two leaves, or a part of one."""
    seen: set[int] = set()
    found = []
    for gradient in gradients:
        place = gradient.untyped_storage().data_ptr()
        alone = gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes and place not in seen
        found.append(gradient if alone else gradient.clone(memory_format=torch.contiguous_format))
        seen.add(place)
    return found


def _batch(pairs: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    return [total for total, _ in pairs], [gradient for _, gradient in pairs]


def _batches(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Batch]:
    """Neighbouring tensors, or rows of a large one, of BUFFER_SIZE numbers together. One row may be larger than that."""
    batch: list[tuple[Tensor, Tensor]] = []
    size = 0
    for total, gradient in pairs:
        rows = max(1, BUFFER_SIZE * len(total) // max(1, total.numel()))
        for part in zip(total.split(rows), gradient.split(rows), strict=True):
            if batch and size + part[0].numel() > BUFFER_SIZE:
                yield _batch(batch)
                batch, size = [], 0
            batch.append(part)
            size += part[0].numel()
    if batch:
        yield _batch(batch)


def _views(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The beginning of a flat buffer, cut into views of the shapes of `like`."""
    ends = accumulate(part.numel() for part in like)
    return [buffer[end - part.numel() : end].view(part.shape) for end, part in zip(ends, like, strict=True)]
