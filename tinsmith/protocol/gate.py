"""Guards a socket that other hosts can reach: only the child that it was made for may connect.

Both ends prove with keys who they are, and all that they say is encrypted (CURVE, which is part of ZeroMQ). A parent
makes new keys for every child and gives them to it privately. ZeroMQ asks about every connection by a request on an
inner socket (its protocol ZAP), which a thread answers.
"""

import threading
import uuid
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import zmq
from zmq.utils import z85

_ZAP = "inproc://zeromq.zap.01"
"""Address at which ZeroMQ asks whether a peer may connect."""

_HANDSHAKE_MS = 300_000
"""Milliseconds for both ends to prove who they are: machines can be very busy."""


@dataclass(frozen=True)
class ChildKeys:
    """Keys by which a child knows its parent and is known, in ZeroMQ's text form."""

    parent: str
    public: str
    secret: str = field(repr=False)

    def show(self, socket: "zmq.Socket[bytes]") -> None:
        """Let a socket that is about to connect prove who it is, and ask the parent to."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.parent.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret.encode())
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


class Gate:
    """Lets one child in."""

    def __init__(self) -> None:
        public, self._secret = zmq.curve_keypair()
        of_child, secret_of_child = zmq.curve_keypair()
        self._public_of_child = z85.decode(of_child)
        self.keys = ChildKeys(public.decode(), of_child.decode(), secret_of_child.decode())
        self._domains: list[str] = []

    def guard(self, socket: "zmq.Socket[bytes]", once: bool) -> None:
        """Let nobody but the child connect to a socket of this process's context; with `once` only one time.

        The socket is to be bound later.
        """
        domain = uuid.uuid4().hex
        self._domains.append(domain)
        _doorman().guests[domain.encode()] = _Guest(self._public_of_child, once)
        socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)

    def close(self) -> None:
        for domain in self._domains:
            _doorman().guests.pop(domain.encode(), None)


class _Guest(NamedTuple):
    """The child that may connect to a socket."""

    key: bytes
    once: bool


class _Doorman:
    """Answers ZeroMQ's questions about all sockets of this process's context that a gate guards, in a thread."""

    def __init__(self) -> None:
        self.guests: dict[bytes, _Guest] = {}
        """Children that may connect, by the domain of the socket."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._questions = context.socket(zmq.REP)
        self._questions.bind(_ZAP)
        threading.Thread(target=self._answer, name="doorman", daemon=True).start()

    def _answer(self) -> None:
        while True:
            version, number, domain, _, _, mechanism, *credentials = self._questions.recv_multipart()
            guest = self.guests.get(domain)
            comes = mechanism == b"CURVE" and guest is not None and guest.key == credentials[0]
            if comes and guest is not None and guest.once:
                self.guests.pop(domain, None)
            code, reason = (b"200", b"OK") if comes else (b"400", b"not the child that this socket is for")
            self._questions.send_multipart([version, number, code, reason, b"", b""])


@cache
def _doorman() -> _Doorman:
    return _Doorman()
