"""Collectives of workers: sums and parts of tensors, and small numbers, over NCCL between GPUs and gloo between CPUs.

All workers must call the same methods in the same order. One that never comes lets the others wait, until the engine
ends all of them.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from tinsmith.errors import ConfigError, DeviceLostError, WorkersLostError
from tinsmith.protocol.heartbeat import Exchanges
from tinsmith.protocol.place import Place, listening_at
from tinsmith.protocol.questions import Answers, FindMeeting, MeetingPort

log = logging.getLogger(__name__)

# Lets workers of several hosts find each other: the first opens a port, and tells the engine, which tells the others.
#
# Nobody has to choose a free port. The engine's messages are private; what workers say to each other afterwards, over
# this port, gloo and NCCL, is neither encrypted nor authenticated.

_LOOK_S = 0.1

CONNECT = timedelta(minutes=5)

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def set_communication_variables(interface: str) -> None:
    """Set `communication_variables` in this process, except for variables that the environment has already."""
    for variable, value in communication_variables(interface).items():
        os.environ.setdefault(variable, value)


def communication_variables(interface: str) -> dict[str, str]:
    """Environment variables for gloo and NCCL: the network interface, and no multicast of the NVLink switch (NVLS).

    NCCL 2.29, which torch 2.13 brings, connects no three GPUs where multicast is there and does not work, as in many
    containers on rented GPUs (https://github.com/NVIDIA/nccl/issues/2077). What `benchmarks/` says of several GPUs was
    measured without it.
    """
    return dict(zip(_INTERFACES, (interface, f"={interface}"), strict=True)) | {"NCCL_NVLS_ENABLE": "0"}


def interface_of(host: str) -> str:
    """The network interface of this host that has the address `host`, by which the others reach it.

    Raises ConfigError if none has.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    if host.startswith("127."):
        return LOOPBACK
    raise ConfigError(
        f"no network interface here has the address {host}, by which Ray knows this host; "
        "start Ray with the right --node-ip-address, or name the interface between workers in "
        f"{' and '.join(_INTERFACES)}"
    )


def meet(place: Place, ask: Answers) -> dist.Store:
    """Return the store through which all workers of a group on several hosts meet.

    Raises ConfigError for a host that is not this.
    """
    # Then they need not be found, and stay what they are
    named = all(variable in os.environ for variable in _INTERFACES)
    set_communication_variables(LOOPBACK if named else interface_of(place.host))
    if place.rank == 0:
        with listening_at(place.host):
            listener = socket.create_server((place.host, 0))  # at this address only
        port = listener.getsockname()[1]
        store = _store(place, place.host, port, listener.detach())
        ask(MeetingPort(place.host, port))
        return store
    while True:
        answer = ask(FindMeeting())
        assert isinstance(answer, MeetingPort)
        if answer.port:
            return _store(place, answer.host, answer.port, None)
        time.sleep(_LOOK_S)


def _store(place: Place, host: str, port: int, listener: int | None) -> dist.Store:
    return dist.TCPStore(
        host,
        port,
        place.count,
        listener is not None,
        timeout=CONNECT,
        wait_for_workers=False,
        master_listen_fd=listener,
    )


# The collectives of workers that have met.

LONGEST_WAIT = timedelta(hours=2)
"""Longest wait for a worker that still computes. The engine notices an ended worker or a deadlock much earlier."""
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
"""Gathers one tensor of each worker. torch 2.13 has given it another name."""
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
"""The sum of one tensor of each worker, of which each gets its part. It has another name there too."""
_FIRST_SIZES = {"cuda": (64, 2**22), "cpu": (64,)}
"""Numbers of all workers in a group's first exchanges: NCCL connects GPUs differently for little and for much."""


class ProcessGroup:
    """All workers, seen from one of them. For the thread of its device."""

    def __init__(
        self, place: Place, device: torch.device, ask: Answers | None = None, exchanges: Exchanges | None = None
    ) -> None:
        """Meet the others; returns when all are there.

        Workers of several hosts `ask` the engine where. `exchanges` shows what it does.

        Raises ConfigError if this host has not the address that others are told.
        """
        self.place = place
        self.device = device
        self._exchanges = exchanges or Exchanges()
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with self._not_alone():
            if place.host:
                assert ask is not None
                store = meet(place, ask)
                dist.init_process_group(backend, None, LONGEST_WAIT, place.count, place.rank, store)
            else:  # on one host: nobody else needs to reach them
                set_communication_variables(LOOPBACK)
                dist.init_process_group(backend, place.meeting, LONGEST_WAIT, place.count, place.rank)

    def connect(self) -> None:
        """Exchange something in every way that there is.

        To be called by all, before the memory of the devices is divided.

        NCCL takes its buffers when two GPUs first exchange something so: hundreds of megabytes that PyTorch does not
        count. Taken now, they are gone from the memory that is divided later, and no pass runs out of memory in them:
        that ends workers.
        """
        before = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0
        for most in _FIRST_SIZES[self.device.type]:
            size = max(1, most // self.count)
            part, whole = torch.zeros(size, device=self.device), torch.zeros(size * self.count, device=self.device)
            self.all_reduce(whole)
            self.begin_all_gather(whole, part)()
            self.begin_reduce_scatter(part, whole)()
            self.all_to_all(whole, whole.clone(), [size] * self.count, [size] * self.count)
        if self.device.type == "cuda":
            del part, whole
            with self._not_alone():
                # What cannot be exchanged is said here, and not in the middle of a pass
                torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            taken = before - torch.cuda.mem_get_info(self.device)[0]
            log.info(
                "%s is connected to the others: %.0f MiB of %s are taken",
                self.place.name,
                max(0, taken) / 2**20,
                self.device,
            )

    @property
    def count(self) -> int:
        return self.place.count

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by the sum of those of all workers, with the same bits on each."""
        with self._not_alone():
            dist.all_reduce(tensor)

    def begin_all_gather(self, whole: Tensor, part: Tensor) -> Callable[[], None]:
        """Begin to gather the parts of all workers, of one size and by rank.

        What is returned waits until `whole` is there.

        Until then neither tensor may be touched.
        """
        with self._not_alone():
            work = _all_gather(whole, part, async_op=True)
        return self._waits_for(work)

    def begin_reduce_scatter(self, part: Tensor, whole: Tensor) -> Callable[[], None]:
        """Begin to add up the `whole` of all workers.

        What is returned waits until `part` is this worker's part of the sum, by rank.

        Until then neither tensor may be touched.
        """
        with self._not_alone():
            work = _reduce_scatter(part, whole, async_op=True)
        return self._waits_for(work)

    def _waits_for(self, work: Any) -> Callable[[], None]:
        def wait() -> None:
            with self._not_alone():
                work.wait()

        return wait

    def gather(self, number: int) -> list[int]:
        """The numbers of all workers, by rank. Of 64 bits."""
        found = torch.zeros(self.count, dtype=torch.int64)
        found[self.place.rank] = number
        self.all_reduce(found)
        return found.tolist()

    def texts(self, text: str) -> list[str]:
        """The texts of all workers, by rank."""
        data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        sizes = self.gather(len(data))
        found = torch.zeros(self.count, max(sizes), dtype=torch.uint8)
        found[self.place.rank, : len(data)] = data
        self.all_reduce(found)
        return [row[:size].numpy().tobytes().decode().rstrip("\0") for row, size in zip(found, sizes, strict=True)]

    def workers_beside(self) -> list[int]:
        """Return the number of workers on each worker's host, itself included, by rank.

        To be called by all at the same time.
        """
        hosts = self.texts(self.place.host)
        return [hosts.count(host) for host in hosts]

    def all_to_all(self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sizes: Sequence[int]) -> None:
        """Give each worker its part of `sent`, and take a part of `received` from each.

        Both are flat, the parts in order of the ranks.
        """
        with self._not_alone():
            dist.all_to_all_single(received, sent, list(received_sizes), list(sizes))

    def agree(self, number: int, what: str) -> None:
        """Raise DeviceLostError on all workers if `what`, a number of each, is not the same on all."""
        numbers = self.gather(number)
        if len(set(numbers)) > 1:
            raise DeviceLostError(f"the workers are not the same any more: {what} is {numbers}, by rank")

    def close(self) -> None:
        dist.destroy_process_group()

    @contextmanager
    def _not_alone(self) -> Iterator[None]:
        """Raises WorkersLostError where the others cannot be reached: nothing more can be computed with them."""
        try:
            with self._exchanges.one():
                yield
        except (RuntimeError, ValueError) as error:
            raise WorkersLostError(f"{self.place.name} cannot reach the others: {error}") from error
