"""A thread that tells the parent, twice a second, that this process runs.

A heartbeat also says how long a worker has been busy with its current turn, for people who look at the server, for how long it has shown
no sign of progress (`progress.py`), and whether it waits for others. A process that is frozen, or whose machine is, sends nothing.
"""

import os
import threading
import time

import zmq

from tinsmith.protocol.gate import ChildKeys
from tinsmith.protocol.link import heartbeat_address
from tinsmith.protocol.progress import Exchanges, Progress
from tinsmith.protocol.serving import Alive

BEAT_S = 0.5

_UNREAD = 10
"""Heartbeats that may wait for a parent that does not read; further ones are not sent."""

_FORGOTTEN_S = 300.0
"""After so long without a heartbeat that could be sent, a parent on another host is gone, or has given this process up."""


class Heartbeat:
    """The heartbeats of this process, from `start` on until the process ends."""

    def __init__(self, address: str, parent_pid: int | None = None, keys: ChildKeys | None = None) -> None:
        """Send to the parent that bound the link `address`, between hosts with its `keys`.

        With `parent_pid` this process ends at once when that parent is gone: nobody waits for it, and the next process needs the device.
        With `keys` as well it also ends when nobody has taken its heartbeats for five minutes: on a host that had vanished and came
        back, Ray may leave it running.
        """
        self._parent_pid = parent_pid
        self._address = heartbeat_address(address)
        self._keys = keys
        self._busy_since: float | None = time.monotonic()
        self.worker_busy_s: float | None = None
        """Seconds that the worker has been busy, which an engine reports in place of its own."""
        self.exchanges = Exchanges()

    def start(self) -> None:
        """Start the thread, which has a socket of its own: ZeroMQ's sockets belong to one thread."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def busy(self) -> None:
        """Begin a turn. Loading the models counts as the first."""
        self._busy_since = time.monotonic()

    def idle(self) -> None:
        self._busy_since = None

    def _run(self) -> None:
        socket = zmq.Context().socket(zmq.PUSH)
        socket.set_hwm(_UNREAD)
        socket.setsockopt(zmq.LINGER, 0)
        if self._keys is not None:
            self._keys.show(socket)
        socket.connect(self._address)
        progress = Progress()
        refused_since: float | None = None
        while True:
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                os._exit(1)
            # Whether it waits is read once, and first: when an exchange has ended, that it lasted long says nothing any more.
            waits, turn = self.exchanges.waits, self._busy_since
            is_idle = turn is None or self.worker_busy_s is not None
            progress.look(BEAT_S, None if is_idle else (turn, waits, self.exchanges.begun))
            alive = Alive(self._busy_s(), progress.still_s, progress.stuck_s, waits)
            try:
                socket.send_multipart(alive.to_frames(), flags=zmq.NOBLOCK)
                refused_since = None
            except zmq.Again:
                refused_since = refused_since or time.monotonic()
                ends_itself = self._parent_pid is not None and self._keys is not None
                if ends_itself and time.monotonic() - refused_since > _FORGOTTEN_S:
                    os._exit(1)
            time.sleep(BEAT_S)

    def _busy_s(self) -> float:
        since = self._busy_since
        if self.worker_busy_s is not None:
            return self.worker_busy_s
        return 0.0 if since is None else time.monotonic() - since
