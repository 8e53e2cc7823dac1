"""Gradients of one model, accumulated over passes until a step takes them.

A pass serves several models. If memory ran out while their gradients are added, the pass would be computed again and some gradients would
count twice. So everything that allocates is done when a contribution is made (`Addition`); to add it only writes to tensors that exist.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from tinsmith.models.full import Weights

BUFFER_SIZE = 2**22
"""Numbers that are converted to float32 at a time."""

Batch = tuple[list[Tensor], list[Tensor]]
"""Parts of the float32 totals, and of the gradients to add to them."""


class GradientAccumulator:
    """Sums of gradients in float32, laid out like `Weights.buffers`."""

    def __init__(self, weights: Weights, keeps_first: bool = False) -> None:
        """With `keeps_first`, gradients of a single pass stay in the precision of the base."""
        self.weights = weights
        self.keeps_first = keeps_first
        self.totals: list[Tensor] | None = None
        """None before the first gradients."""

    @property
    def gradients(self) -> list[Tensor] | None:
        """Accumulated gradients, float32, in the order of `Weights.tensors`; None before the first."""
        return self.weights.cut(_wide(self.totals)) if self.totals is not None else None

    @property
    def nbytes(self) -> int:
        return sum(total.nbytes for total in self.totals or ())

    def take(self) -> list[Tensor] | None:
        """Return the totals, and begin anew."""
        totals, self.totals = self.totals, None
        return totals

    def contribution(self, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        """Return a function that adds the gradients of one pass, which belong to it from now on.

        They come in the order of `Weights.tensors`, None where the pass did not reach a tensor. This may run out of memory, and changes
        nothing then; calling what it returns cannot fail.
        """
        joined = self.weights.joined(gradients)
        if self.totals is not None:
            self.widen()
            return Addition(self.totals, joined).add
        return partial(self._begin_with, apart(joined if self.keeps_first else _wide(joined)))

    def _begin_with(self, totals: list[Tensor]) -> None:
        self.totals = totals

    def widen(self) -> None:
        """Turn what has been accumulated into float32, tensor by tensor: there need not be room for all in both precisions."""
        totals = self.totals or []
        for index, total in enumerate(totals):
            totals[index] = total.float()

    def begin_with_zeros(self) -> None:
        like = self.weights.buffers()
        self.totals = [torch.zeros_like(buffer, requires_grad=False, memory_format=torch.contiguous_format) for buffer in like]


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.float() for tensor in tensors]


class Addition:
    """The gradients of one pass for one model. Making it may run out of memory; `add` cannot."""

    def __init__(self, totals: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Take `totals` in float32. A GPU converts gradients of another precision as it adds; a CPU needs a buffer for that."""
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
    """Copy those that share their memory: autograd may give one tensor for two leaves, or a part of one."""
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
    """Yield neighbouring tensors, or rows of a large one, of BUFFER_SIZE numbers together; one row may be larger."""
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
    """Cut the beginning of a flat buffer into views of the shapes of `like`."""
    ends = accumulate(part.numel() for part in like)
    return [buffer[end - part.numel() : end].view(part.shape) for end, part in zip(ends, like, strict=True)]
