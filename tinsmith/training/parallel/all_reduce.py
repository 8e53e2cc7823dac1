"""The optimizer step of a model that all workers hold, each with the gradients of its own datums (data parallelism).

Gradients are summed over all workers in float32 (all-reduce), and each takes the step for itself. The sum has the same
bits everywhere, and so have the weights afterwards. That is checked every time, by the norm of the gradient and the sum
of the bits of all weights.
"""

import logging
import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from tinsmith.errors import DeviceLostError, TinsmithError
from tinsmith.protocol.shapes import AdamSettings
from tinsmith.training.compact import Optimizer
from tinsmith.training.parallel.process_group import ProcessGroup

log = logging.getLogger(__name__)

PIECE = 2**22
"""Numbers in a narrower precision than float32 that are added up at a time."""
_REFUSED, _FAILED = -1, -2
"""Codes of a worker that took no step: for a reason that all must have, or for another."""
_NO_SIGN = 2**63 - 1


def all_reduce_step(optimizer: Optimizer, settings: AdamSettings, group: ProcessGroup) -> dict[str, float]:
    """Take a step with the gradients of all workers, which all call this.

    Raises what `step` raises if it does so on all, TinsmithError if one had no memory before anything changed, and
    DeviceLostError if the weights differ now.
    """
    accumulator = optimizer.accumulator
    if not any(group.gather(accumulator.totals is not None)):
        return optimizer.step(settings)
    lacking: Exception | None = None
    try:
        if accumulator.totals is None:
            accumulator.begin_with_zeros()
        accumulator.widen()
        optimizer.claim_moments()
        narrow = any(total.dtype != torch.float32 for total in accumulator.totals or ())
        buffer = torch.empty(PIECE if narrow else 0, device=group.device)
    except (RuntimeError, MemoryError) as error:
        lacking = error
    if any(group.gather(lacking is not None)):
        accumulator.totals = None
        raise lacking or TinsmithError(
            "the step was refused, the gradients are cleared and the weights stay as they were: "
            "another worker has no memory for them; "
            "end other models or their sampling"
        )
    for total in accumulator.totals or ():
        for wide in _widened(total, buffer):
            group.all_reduce(wide)
    return _same_on_all(optimizer, settings, group)


def _widened(total: Tensor, buffer: Tensor) -> Iterator[Tensor]:
    """Yield the tensor in float32, as a whole or in pieces, each of which is put back after it was changed."""
    if total.dtype == torch.float32:
        yield total
        return
    for piece in total.view(-1).split(len(buffer)):
        wide = buffer[: len(piece)].copy_(piece)
        yield wide
        piece.copy_(wide)


@torch.no_grad()
def state_after(optimizer: Optimizer, grad_norm: float) -> int:
    """Return 63 bits that differ, as good as always, where the norm of the gradient or any bit of a weight does."""
    norm: int = struct.unpack("<q", struct.pack("<d", grad_norm))[0]
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        leaf.detach().view(kinds[leaf.dtype.itemsize]).sum(dtype=torch.int64) for leaf in optimizer.weights.compared()
    ]
    total = int(torch.stack(sums).sum().item())
    return (total * 0x9E3779B97F4A7C15 ^ norm) & _NO_SIGN


def _same_on_all(optimizer: Optimizer, settings: AdamSettings, group: ProcessGroup) -> dict[str, float]:
    metrics: dict[str, float] = {}
    failure: Exception | None = None
    try:
        metrics = optimizer.step(settings)
        said = state_after(optimizer, metrics["grad_norm"])
    except TinsmithError as error:
        failure, said = error, _REFUSED
    except Exception as error:  # of whatever kind: the others wait for what this one says
        log.warning("a step failed: %s", error, exc_info=True)
        failure, said = error, _FAILED
    heard = group.gather(said)
    if len(set(heard)) > 1:
        raise DeviceLostError(
            f"{group.place.name} took another step than the others, or none where they took one: {failure or metrics}"
        )
    if failure is not None:
        raise failure
    return metrics
