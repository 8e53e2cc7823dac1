"""A process group of the trainer and the vLLM workers of one server, to send weights from one GPU to the others.

All ends use this module, which needs PyTorch only. It is NCCL between GPUs, Gloo between CPUs. All are on one machine,
and their environment says so (`communication_variables` of `training/parallel/process_group.py`): no port is open to
others.
"""

import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

log = logging.getLogger(__name__)

TRAINER, FIRST_WORKER = 0, 1
_LONGEST = timedelta(minutes=5)
"""Longest wait of one end for the others, unless told otherwise; and, with NCCL, for each tensor.

NCCL then ends the whole process, so the trainer gives up before that.
"""
_LONGEST_WITH_GLOO = timedelta(seconds=30)
"""The same for each tensor with Gloo, which cannot be told to give up."""


class TransferGroup:
    """One end. For one thread at a time."""

    def __init__(
        self, meeting_point: str, rank: int, size: int, device: torch.device, within: timedelta = _LONGEST
    ) -> None:
        """Connect to the other ends, `size` in all.

        `meeting_point` is the path of a file that does not exist yet, the same for all.

        NCCL connects with the first tensor, and waits for ever for an end that never comes, or has no memory to receive
        it in. So each end first takes that memory and says that it is there, and a small tensor is exchanged here.
        Raises RuntimeError if another end does not come `within` this time. An end that is lost between that and NCCL's
        connection leaves the others waiting.
        """
        self.device = device
        self._size = size
        first = torch.zeros(1, device=device)
        store = distributed.FileStore(meeting_point, size)
        store.set(f"end {rank}", "is there")
        store.wait([f"end {each}" for each in range(size)], within)
        self._group: Any
        if device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = _LONGEST
            self._group = distributed.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = distributed.ProcessGroupGloo(store, rank, size, _LONGEST)
        self._broadcast(first)
        self._finish()

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Send tensors from the trainer; all have been sent when it returns.

        Raises RuntimeError if another end is lost.
        """
        for tensor in tensors:
            self._broadcast(tensor.detach().contiguous())
        self._finish()

    def receive(
        self, shapes: Sequence[tuple[torch.Size, torch.dtype]], load: Callable[[Iterator[Tensor]], None]
    ) -> None:
        """Receive tensors of these shapes and types in a worker, in the order of sending, and give them to `load`.

        If that fails, or does not want them all, the others are received nevertheless: the other workers get each at
        the same time. A worker that cannot receive one, because it has no memory for example, ends its process if there
        are others: they would wait for it.
        """
        tensors = _Received(self, shapes)
        with ExitStack() as rest:
            rest.callback(tensors.receive_rest)
            load(tensors)
        self._finish()

    def abort(self) -> None:
        """End the group and what is under way: the thread that waits gets an error, with Gloo after its time-out."""
        self._group.abort()

    def _broadcast(self, tensor: Tensor) -> None:
        options = distributed.BroadcastOptions()  # from rank 0, unless told otherwise
        if self.device.type == "cpu":
            options.timeout = _LONGEST_WITH_GLOO
        self._group.broadcast([tensor], options).wait()

    def _receive_one(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._broadcast(tensor)
        return tensor

    def _finish(self) -> None:
        """Wait for the GPU: NCCL only puts work into its queue."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class _Received(Iterator[Tensor]):
    """The tensors of an update, as they are received. A failure is tried again with the next call."""

    def __init__(self, group: TransferGroup, shapes: Sequence[tuple[torch.Size, torch.dtype]]) -> None:
        self.count = 0
        """Number of received tensors."""
        self._group = group
        self._shapes = shapes

    def __next__(self) -> Tensor:
        if self.count == len(self._shapes):
            raise StopIteration
        tensor = self._group._receive_one(*self._shapes[self.count])
        self.count += 1
        return tensor

    def receive_rest(self) -> None:
        try:
            for _ in self:
                pass
        except (RuntimeError, MemoryError):
            if self._group._size > FIRST_WORKER + 1:
                log.exception(
                    "this worker ends: it cannot receive tensor %d of %d, and others would wait for it",
                    self.count,
                    len(self._shapes),
                )
                os.kill(os.getpid(), signal.SIGKILL)
            raise
