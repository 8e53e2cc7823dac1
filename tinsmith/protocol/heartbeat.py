"""A thread that tells the parent, twice a second, that this process runs.

A heartbeat also says how long a worker has been busy with its current turn, for people who look at the server, for how
long it has shown no sign of progress (`Progress`), and whether it waits for others. A process that is frozen, or whose
machine is, sends nothing.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil
import zmq

from tinsmith.protocol.gate import ChildKeys
from tinsmith.protocol.link import heartbeat_address
from tinsmith.protocol.serving import Alive

# Whether a process that is busy gets on, judged by one of its threads: for how long there was no sign of it.
#
# - `still_s`: nothing has moved. No thread came on in its Python code, none used a processor or waits for a disk, nor
#   does a child. So is a thread that hangs in a driver, or waits for what never comes. Tens of seconds are too long.
# - `stuck_s`: no thread came on in its Python code, whatever processors and disks do: all are in one and the same call.
#   So is a thread that waits for a kernel of a GPU which never ends, because it spins, but also one in a long call.
#   Only many minutes are too long. The longest call is the wait for what a GPU was given ahead, at most a thousand
#   launches.

SIGN = 0.02
"""CPU share above which a process counts as working, beside that of threads that do not count."""

APART = ("heartbeat", "reports", "vllm")
"""Threads whose CPU use is no sign: those that look and report, and the one for vLLM servers: nobody waits for them."""

_THREADS = Path("/proc/self/task")
"""Threads of this process, on Linux."""

_Position = tuple[tuple[int, int], ...]
"""Position of a thread in its Python code: each call and its instruction, as numbers, which keep nothing alive."""


class Exchanges:
    """Exchanges of a worker with the others, which its device's thread goes through. Any thread may look."""

    def __init__(self) -> None:
        self.waits = False
        """Whether this worker waits in an exchange: for another worker, or for the network."""
        self.begun = 0
        """Number of exchanges begun, which tells a new one from one that lasts."""

    @contextmanager
    def one(self) -> Iterator[None]:
        """The body is an exchange."""
        self.begun += 1
        self.waits = True
        try:
            yield
        finally:
            self.waits = False


class Progress:
    """Looks of a thread at the process that it runs in."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._used_s = 0.0
        self._looked_at = time.monotonic()
        self._others_s: dict[int, float] = {}
        self._at: object = None
        self.still_s = 0.0
        """Seconds without any movement, counted in looks: a process that was stopped has not looked."""
        self.stuck_s = 0.0
        """Seconds in which no thread came on in its Python code; at least `still_s`."""

    def look(self, since_s: float, at: object) -> None:
        """Look again, `since_s` seconds after the last time.

        `at` tells what the process is doing, None if it has no work. Always from the same thread.
        """
        now = None if at is None else (at, _positions())
        came_on = now is None or now != self._at
        self._at = now
        used_s, looked_at = _used_s(), time.monotonic()
        used, self._used_s = used_s - self._used_s, used_s
        # On a busy machine looks come late
        passed_s, self._looked_at = max(since_s, looked_at - self._looked_at), looked_at
        children_work = self._children_work(passed_s)
        moved = came_on or used >= SIGN * passed_s or children_work or _waits_for_disk()
        self.still_s = 0.0 if moved else self.still_s + since_s
        self.stuck_s = 0.0 if came_on else self.stuck_s + since_s

    def _children_work(self, passed_s: float) -> bool:
        """Whether its child processes, and theirs, use a processor, or come and go: compilers, which are waited for.

        Servers have process groups of their own, and nobody waits for what they compute.
        """
        before, self._others_s = self._others_s, {}
        own_group = os.getpgrp()
        for child in self._process.children(recursive=True):
            try:
                if os.getpgid(child.pid) == own_group:
                    self._others_s[child.pid] = sum(child.cpu_times()[:2])
            except (psutil.Error, OSError):  # it has just ended
                return True
        if before.keys() != self._others_s.keys():
            return True
        return sum(self._others_s.values()) - sum(before.values()) >= SIGN * passed_s


def _used_s() -> float:
    """Seconds of a processor that this process has used so far, but for the threads whose work is no sign."""
    apart = (
        thread.native_id
        for thread in threading.enumerate()
        if thread.name in APART and thread is not threading.current_thread()
    )
    return time.process_time() - time.thread_time() - sum(_used_by(native_id) for native_id in apart)


def _used_by(native_id: int | None) -> float:
    """Seconds that a thread has used; 0 if it has just ended, or the system does not tell.

    Linux has a clock for each thread, numbered as here. Its `schedstat` lags behind by a second on processors without a
    tick.
    """
    with suppress(OSError):
        return 0.0 if native_id is None else time.clock_gettime(~native_id << 3 | 6)
    return 0.0


def _positions() -> dict[int, _Position]:
    """Return the position of each working thread. One that computes without Python keeps its last position.

    Daemons serve others or look around, for which nobody waits: a progress bar of a download leaves one that wakes
    every ten seconds for ever. Threads that Python has not started, such as autograd's, have an entry of another class
    if they have one.
    """
    # CPython 3.11 crashes if garbage is collected while it makes an object for a call of another thread, and that call
    # ends meanwhile.
    collects = gc.isenabled()
    gc.disable()
    try:
        return _positions_now()
    finally:
        if collects:
            gc.enable()


def _positions_now() -> dict[int, _Position]:
    daemons = {
        thread.ident
        for thread in threading.enumerate()
        if thread.daemon and not isinstance(thread, threading._DummyThread)
    }
    apart = daemons | {threading.get_ident()}
    return {ident: _position(frame) for ident, frame in sys._current_frames().items() if ident not in apart}


def _position(frame: FrameType | None) -> _Position:
    calls = []
    while frame is not None:
        calls.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return tuple(calls)


def _waits_for_disk() -> bool:
    """Whether a thread is in the middle of reading or writing (state D): the one that works may wait for it."""
    return any(_state_of(thread) == "D" for thread in _THREADS.glob("*/stat"))


def _state_of(stat: Path) -> str:
    """The state of a thread, a letter; empty if it has just ended."""
    with suppress(OSError):
        return stat.read_text().rpartition(")")[2].split()[0]
    return ""


# The messages that say so.

BEAT_S = 0.5

_UNREAD = 10
"""Heartbeats that may wait for a parent that does not read; further ones are not sent."""

_FORGOTTEN_S = 300.0
"""Seconds without a heartbeat sent after which a parent on another host is gone, or has given this process up."""


def beside_socket(address: str, keys: ChildKeys | None) -> "zmq.Socket[bytes]":
    """Connect a thread to the parent's heartbeat address; at most `_UNREAD` messages wait for the parent."""
    socket = zmq.Context().socket(zmq.PUSH)
    socket.set_hwm(_UNREAD)
    socket.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        keys.show(socket)
    socket.connect(address)
    return socket


class Heartbeat:
    """The heartbeats of this process, from `start` on until the process ends."""

    def __init__(self, address: str, parent_pid: int | None = None, keys: ChildKeys | None = None) -> None:
        """Send to the parent that bound the link `address`, between hosts with its `keys`.

        With `parent_pid` this process ends at once when that parent is gone: nobody waits for it, and the next process
        needs the device. With `keys` as well it also ends when nobody has taken its heartbeats for five minutes: on a
        host that had vanished and came back, Ray may leave it running.
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
        socket = beside_socket(self._address, self._keys)
        progress = Progress()
        refused_since: float | None = None
        while True:
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                os._exit(1)
            # Whether it waits is read once, and first: when an exchange has ended, how long it lasted says nothing.
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
