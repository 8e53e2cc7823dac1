"""How many CPU threads a pass is worth.

A small pass is a row of operations that are each over before a second thread has woken up. Where other processes need the cores too, as the
server and its clients do, threads that wait for each other make it several times slower, and their waiting takes the cores from the others.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tinsmith.models.base import BaseModel

SMALL_PASS = 2**27
"""Multiply-adds of a forward pass, below which one thread is enough: 500 tokens of the tiny model, less than one token of a real one."""


@contextmanager
def threads_for(base: BaseModel, tokens: int) -> Iterator[None]:
    """Run a pass over that many tokens with one thread if it is small; afterwards the number of threads is as it was."""
    weights = base.lm_head.numel() + sum(inputs * outputs for inputs, outputs in base.linears.values())
    if base.device.type != "cpu" or tokens * weights >= SMALL_PASS:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
