"""Chooses the number of CPU threads for a pass or an optimizer step.

The operations of a small pass are each over before a second thread has woken up. Where other processes need the cores too, threads that
wait for each other make it several times slower, and take the cores from the others.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from tinsmith.models.base import BaseModel

SMALL_PASS = 2**27
"""Multiply-adds of a forward pass below which one thread is enough: 500 tokens of the tiny model, less than one of a real one."""

SMALL_STEP = 2**22
"""Parameters below which one thread is enough for an optimizer step: torch's fused AdamW lets all threads meet at every tensor."""


def threads_for(base: BaseModel, tokens: int) -> AbstractContextManager[None]:
    """Run a pass over that many tokens with one thread if it is small; afterwards the number of threads is as it was."""
    weights = sum(target.in_features * target.out_features for target in base.layout.targets.values())
    return _one_thread() if base.device.type == "cpu" and tokens * weights < SMALL_PASS else nullcontext()


def threads_for_step(parameters: int) -> AbstractContextManager[None]:
    """Run an optimizer step over that many parameters with one thread if it is small; afterwards as `threads_for`."""
    return _one_thread() if parameters < SMALL_STEP else nullcontext()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
