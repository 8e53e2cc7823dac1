"""Decides how many layers of a pass are recomputed, from the free memory and from what earlier passes took.

A pass that runs out of memory all the same is tried again with as much recomputation as there is. What does not help a
row of several sequences is halved (`training/pass_runner.py`); a single one lets the inputs of its layers wait in host
memory before it is refused.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from tinsmith.errors import TinsmithError
from tinsmith.memory.budget import FREE_SHARE
from tinsmith.memory.pass_memory import KEEP_ALL, PassMemory, Recomputation
from tinsmith.models.machine import free_memory, give_back_pinned_memory

log = logging.getLogger(__name__)

T = TypeVar("T")
Choice = Callable[[], Recomputation | None]

TOO_SMALL = 2**26
"""Bytes of an estimate below which nothing is measured: allocations of other sizes than ours would be most of it."""
PATIENCE = 64
"""Passes without an out-of-memory after which larger ones are tried again."""


@dataclass(frozen=True)
class PassFailure:
    """Why a pass failed, without the tensors that an exception and its traceback hold."""

    error_type: str
    """Name of the class of a TinsmithError."""
    reason: str
    out_of_memory: bool
    """Whether the same work may succeed with more recomputation or in smaller passes."""


def attempted(compute: Callable[[], T], *raised: type[Exception], traceback: bool = True) -> T | PassFailure:
    """Return what `compute` does, or why it failed.

    Errors of the kinds `raised`, which no other attempt can help, are raised.
    """
    try:
        return compute()
    except raised:
        raise
    except Exception as error:
        known = isinstance(error, TinsmithError)
        out_of_memory = not known and is_out_of_memory(error)
        if known or out_of_memory:
            kind = type(error).__name__
            return PassFailure(kind if known else TinsmithError.__name__, str(error) or kind, out_of_memory)
        # It is first seen here: of a datum that a check let through, of our code, or of the device.
        log.warning("a pass failed", exc_info=traceback)
        return PassFailure(TinsmithError.__name__, f"{type(error).__name__}: {error}", out_of_memory=False)


class MemoryRetries:
    """Recomputation for the passes of one base model. `promised` returns the free bytes that others will still take."""

    def __init__(
        self,
        memory: PassMemory,
        device: torch.device,
        logits_chunk: int,
        promised: Callable[[], int],
        give_back: Callable[[], bool] = lambda: False,
        agree: Callable[[Choice], Recomputation | None] = lambda choose: choose(),
    ) -> None:
        """`give_back` frees memory and returns whether there was any; `agree` lets several workers choose the same."""
        self.memory = memory
        self.device = device
        self.logits_chunk = logits_chunk
        self.promised = promised
        self.give_back = give_back
        self.agree = agree
        self.factor = 1.0
        """Ratio of real to estimated memory of recent passes: it rises at once and falls slowly."""
        self.undisturbed = 0
        """Passes since the last out-of-memory."""

    def run(
        self, attempt: Callable[[Recomputation], T | PassFailure], tokens: int, backward: bool, alone: bool
    ) -> T | PassFailure:
        """Attempt a pass, with more recomputation whenever it runs out of memory, until nothing more can help.

        Only a sequence that is `alone` in its row may let inputs of layers wait in host memory.
        """
        recomputation = self.agree(partial(self.first, tokens, backward)) or KEEP_ALL
        if recomputation != KEEP_ALL and self.give_back():
            recomputation = self.first(tokens, backward)
        while True:
            outcome = attempt(recomputation)
            if not isinstance(outcome, PassFailure):
                self.undisturbed += 1
                return outcome
            if not outcome.out_of_memory:
                return outcome
            if self.give_back():
                continue
            more = self.agree(partial(self.more, recomputation, tokens, alone=alone)) if backward else None
            if more is None:
                return outcome
            recomputation = more
            where = ", with their inputs in host memory" if more.offload else ""
            log.warning(
                "out of memory in a pass of %d tokens: it recomputes %d layers%s", tokens, more.recompute, where
            )

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
        """Correct the estimate after an out-of-memory; returns what to try next, None if recomputing cannot help."""
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

        `peak` is the most ever in use until its end, `former` until its beginning. If both are equal, the pass took at
        most what lies between, which can only lower the estimate.
        """
        ratio = (peak - before) / expected
        if peak > former and ratio > self.factor:
            self.factor = ratio
        elif ratio < self.factor:
            self.factor = 0.9 * self.factor + 0.1 * ratio

    def may_grow(self) -> bool:
        """Whether larger passes may be tried again, which this counts as tried."""
        if self.undisturbed < PATIENCE:
            return False
        self.undisturbed = 0
        return True


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of torch or numpy means that an allocation failed, on any device."""
    text = str(error).lower()  # memory of the host that the device can read has no class of its own
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "can't allocate memory" in text
        or "out of memory" in text
    )
