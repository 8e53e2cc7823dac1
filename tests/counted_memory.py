"""A device whose memory is counted and ends: what torch really has alive, to the byte, on the CPU."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside of it and are alive; more than `limit` are refused as CUDA
    refuses them.

    So is what the operation numbered `fails` asks for, of those that take memory.
    """

    def __init__(self, ignored: Iterable[Tensor] = (), limit: float = float("inf"), fails: int = 0) -> None:
        """`ignored` were there before."""
        begin: Any = super().__init__
        begin()
        self.ignored = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in ignored}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.limit, self.fails = limit, fails
        self.operations: int = 0
        self.peak: int = 0
        self.refused = 0
        """How often memory was asked for that there was not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not func.is_view and not func.name().split("::")[1].split(".")[0].endswith("_")
        if self.operations == self.fails > 0:
            self.fails = 0
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                if reference.cdata not in self.ignored:
                    self.alive[reference.cdata] = (reference, tensor.untyped_storage().nbytes())
        self.alive = {place: entry for place, entry in self.alive.items() if not entry[0].expired()}
        taken = sum(size for _, size in self.alive.values())
        if taken > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.peak = max(self.peak, taken)
        return out
