"""Lets workers of several hosts find each other: the first opens a port, and tells the engine, which tells the others.

Nobody has to choose a free port. The engine's messages are private; what workers say to each other afterwards, over this port, gloo and
NCCL, is neither encrypted nor authenticated.
"""

import os
import socket
import sys
import time
from datetime import timedelta

import psutil
import torch.distributed as dist

from tinsmith.errors import ConfigError
from tinsmith.protocol.place import Place, listening_at
from tinsmith.protocol.questions import Answers, FindMeeting, MeetingPort

_LOOK_S = 0.1

CONNECT = timedelta(minutes=5)

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def set_communication_variables(interface: str) -> None:
    """Set in this process what `communication_variables` says, except for variables that the environment has already."""
    for variable, value in communication_variables(interface).items():
        os.environ.setdefault(variable, value)


def communication_variables(interface: str) -> dict[str, str]:
    """The variables of the environment that let gloo and NCCL use a network interface, and NCCL no multicast of the NVLink switch (NVLS).

    NCCL 2.29, which torch 2.13 brings, connects no three GPUs where multicast is there and does not work, as in many containers on rented
    GPUs (https://github.com/NVIDIA/nccl/issues/2077). What `benchmarks/` says of several GPUs was measured without it.
    """
    return dict(zip(_INTERFACES, (interface, f"={interface}"), strict=True)) | {"NCCL_NVLS_ENABLE": "0"}


def interface_of(host: str) -> str:
    """The network interface of this host that has the address `host`, by which the others reach it. Raises ConfigError if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    if host.startswith("127."):
        return LOOPBACK
    raise ConfigError(
        f"no network interface here has the address {host}, by which Ray knows this host; start Ray with the right --node-ip-address, or "
        f"name the interface between workers in {' and '.join(_INTERFACES)}"
    )


def meet(place: Place, ask: Answers) -> dist.Store:
    """Return the store through which all workers of a group on several hosts meet. Raises ConfigError for a host that is not this."""
    named = all(variable in os.environ for variable in _INTERFACES)  # then they need not be found, and stay what they are
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
    return dist.TCPStore(host, port, place.count, listener is not None, timeout=CONNECT, wait_for_workers=False, master_listen_fd=listener)
