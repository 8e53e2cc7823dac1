"""Decides how many layers of a pass are recomputed, from the free memory and from what earlier passes took.

A pass that runs out of memory all the same is tried again with as much recomputation as there is. What does not help a row of several
sequences is halved (`training/backend.py`); a single one lets the inputs of its layers wait in host memory before it is refused.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tinsmith.memory.budget import FREE_SHARE
from tinsmith.memory.pass_memory import KEEP_ALL, PassMemory, Recomputation
from tinsmith.models.machine import free_memory, give_back_pinned_memory

log = logging.getLogger(__name__)

TOO_SMALL = 2**26
"""Bytes of an estimate below which nothing is measured: allocations of other sizes than ours would be most of it."""
PATIENCE = 64
"""Passes without an out-of-memory after which larger ones are tried again."""


class MemoryRetries:
    """Recomputation for the passes of one base model. `promised` returns the free bytes that others will still take."""

    def __init__(self, memory: PassMemory, device: torch.device, logits_chunk: int, promised: Callable[[], int]) -> None:
        self.memory = memory
        self.device = device
        self.logits_chunk = logits_chunk
        self.promised = promised
        self.factor = 1.0
        """Ratio of real to estimated memory of recent passes: it rises at once and falls slowly."""
        self.undisturbed = 0
        """Passes since the last out-of-memory."""

    def estimate(self, tokens: int, recomputation: Recomputation) -> int:
        """Bytes that a forward_backward pass of so many tokens will take, as far as known."""
        return int(self.factor * self.memory.bytes(tokens, self.logits_chunk, recomputation))

    def first(self, tokens: int, backward: bool) -> Recomputation:
        """Return the recomputation to begin with."""
        if not backward or self.estimate(tokens, KEEP_ALL) < TOO_SMALL:
            return KEEP_ALL
        free = int(FREE_SHARE * (free_memory(self.device) - self.promised()) / self.factor)
        return self.memory.recomputation_for(tokens, self.logits_chunk, free) or self.memory.smallest

    def more(self, recomputation: Recomputation, tokens: int, alone: bool) -> Recomputation | None:
        """Correct the estimate after an out-of-memory; returns what to try next, None if only fewer sequences can help."""
        self.undisturbed = 0
        if self.device.type != "cpu":  # where nothing is measured that could correct the factor again
            self.factor *= 1.1
        if recomputation.recompute < self.memory.smallest.recompute:
            return self.memory.smallest
        host = self.memory.smallest_with_host
        if not alone or recomputation.offload or self.device.type == "cpu":
            return None
        needed = self.memory.host_bytes(tokens, host)
        if needed >= free_memory(torch.device("cpu")):
            give_back_pinned_memory()  # of what an earlier pass let wait there
        return host if needed < free_memory(torch.device("cpu")) else None

    @contextmanager
    def measured(self, tokens: int, recomputation: Recomputation) -> Iterator[None]:
        """Compare what the body, a forward_backward pass with LoRA, takes of a GPU with the estimate."""
        expected = self.memory.bytes(tokens, self.logits_chunk, recomputation)
        if self.device.type != "cuda" or expected < TOO_SMALL:
            yield
            return
        former, before = torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_allocated(self.device)
        yield
        self.learn(expected, before, former, torch.cuda.max_memory_allocated(self.device))

    def learn(self, expected: int, before: int, former: int, peak: int) -> None:
        """Note what a pass took, of which `expected` bytes were expected and which began with `before` bytes in use.

        `peak` is the most ever in use until its end, `former` until its beginning. If both are equal, the pass took at most what lies
        between, which can only lower the estimate.
        """
        ratio = (peak - before) / expected
        if peak > former and ratio > self.factor:
            self.factor = ratio
        elif ratio < self.factor:
            self.factor = 0.9 * self.factor + 0.1 * ratio

    def succeeded(self) -> None:
        self.undisturbed += 1

    def may_grow(self) -> bool:
        """Whether larger passes may be tried again, which this counts as tried."""
        if self.undisturbed < PATIENCE:
            return False
        self.undisturbed = 0
        return True


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of torch or numpy means that an allocation failed, on any device."""
    text = str(error).lower()  # memory of the host that the device can read has no class of its own
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text or "out of memory" in text
