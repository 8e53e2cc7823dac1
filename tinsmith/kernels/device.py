"""Detects errors of a device, measures its time, and moves numbers to and from it."""

import math
import mmap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith.errors import DeviceLostError

STAGES = 4
"""So many threads copy weights to a GPU."""
STAGE_BYTES = 32 * 2**20
"""Pinned memory of each."""


def require_device(device: torch.device) -> None:
    """Raise DeviceLostError if `device` does not compute any more.

    After an assertion in a kernel or an illegal access every later operation of the process on that GPU fails. No list
    of messages tells this from an error of one operation, so one is tried that fails by itself only for want of memory.
    """
    try:
        torch.ones(1, device=device).add_(1).item()  # `item` waits for the result: errors of a GPU come late
    except torch.OutOfMemoryError:
        return
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise DeviceLostError(
            f"{device} computes nothing any more, and only a new process can use it: {first_line}"
        ) from error


def upload(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of these numbers on `device`. The host does not wait for a GPU; on a CPU nothing is copied."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def on_device(tensor: Tensor, where: torch.device) -> Tensor:
    """The tensor on that device; from a GPU to the CPU it comes into pinned memory, in one transfer.

    There a GPU can read and write it beside its work.
    """
    if where == tensor.device or where.type != "cpu":
        return tensor.to(where)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)


def move_weights(network: Any, device: torch.device) -> None:
    """Move a network to a device, by several threads: one alone waits for each page of a file."""
    if device.type == "cuda":
        stages = SimpleQueue[Tensor]()
        for _ in range(STAGES):
            stages.put(torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True))
        # Each thread has to say on which device it works: on another it would take memory too.
        with ThreadPoolExecutor(STAGES, initializer=torch.cuda.set_device, initargs=(device,)) as threads:
            list(threads.map(partial(_copy_staged, device=device, stages=stages), network.parameters()))
    network.to(device)  # what is left: buffers


def _copy_staged(parameter: Tensor, device: torch.device, stages: SimpleQueue[Tensor]) -> None:
    source = parameter.data.contiguous()
    copied = torch.empty_like(source, device=device)
    # Nothing that was given to the device before writes into that memory
    torch.cuda.current_stream(device).synchronize()
    stage, stream = stages.get(), torch.cuda.Stream(device)
    try:
        with torch.cuda.stream(stream):
            pieces = [tensor.view(-1).view(torch.uint8).split(STAGE_BYTES) for tensor in (source, copied)]
            for read, written in zip(*pieces, strict=True):
                written.copy_(stage[: len(read)].copy_(read), non_blocking=True)
                stream.synchronize()
    finally:
        stages.put(stage)
    parameter.data = copied


def pieces_on_host(memory: Tensor) -> Iterator[Tensor]:
    """Bytes [n] of a device as pieces in the host's memory; each is valid until the next.

    The thread waits for what the GPU was given before, and the GPU for nothing: the bytes travel on a stream of their
    own, through pinned memory. Those that are on the host already are not copied.
    """
    if memory.device.type == "cpu":
        yield memory
        return
    stage = torch.empty(min(STAGE_BYTES, len(memory)), dtype=memory.dtype, pin_memory=True)
    stream = torch.cuda.Stream(memory.device, priority=-1)  # nothing is captured on one of this priority
    stream.wait_stream(torch.cuda.current_stream(memory.device))
    for piece in memory.split(STAGE_BYTES):
        with torch.cuda.stream(stream):
            arrived = stage[: len(piece)].copy_(piece, non_blocking=True)
        stream.synchronize()
        yield arrived


def to_host(memory: Tensor) -> Tensor:
    """Bytes [n] of a device in the host's memory (see `pieces_on_host`); those that lie there are not copied."""
    if memory.device.type == "cpu":
        return memory
    host = torch.empty_like(memory, device="cpu")
    for piece, place in zip(pieces_on_host(memory), host.split(STAGE_BYTES), strict=True):
        place.copy_(piece)
    return host


def reserve_zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of this size for a cache. On a CPU each page is taken when it is first written."""
    count = math.prod(size)
    if device.type != "cpu" or not count:
        return torch.zeros(*size, dtype=dtype, device=device)
    # Lives as long as the tensor
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(*size)


class Stopwatch:
    """Measures how long a device needs for what it is given from now until `stop`. A GPU's time is known later."""

    def __init__(self, device: torch.device) -> None:
        self._since, self._until = time.monotonic(), 0.0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._stream = torch.cuda.current_stream(device) if self._events else None
        self._record(0)

    def _record(self, which: int) -> None:
        if self._stream is not None:
            self._events[which].record(self._stream)

    def stop(self) -> None:
        self._until = time.monotonic()
        self._record(1)

    @property
    def seconds(self) -> float | None:
        """The time, once the device has come to the end; never waits."""
        if not self._events:
            return self._until - self._since
        return self._events[0].elapsed_time(self._events[1]) / 1000 if self._events[1].query() else None


class Fetched:
    """Tensors of one precision and device on their way to the host, in one transfer that later work does not delay."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.shapes = [tensor.shape for tensor in tensors]
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])  # [numbers of all]
        self._host, self._copied = flat, None
        if flat.is_cuda:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat, non_blocking=True)
            self._copied = torch.cuda.current_stream(flat.device).record_event()

    def arrived(self) -> list[NDArray[Any]]:
        """The tensors as arrays. Waits until they are there."""
        if self._copied is not None:
            self._copied.synchronize()
        cut = self._host.split([shape.numel() for shape in self.shapes])
        return [values.view(shape).numpy() for values, shape in zip(cut, self.shapes, strict=True)]
