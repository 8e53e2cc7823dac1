"""A thread that reports to the parent, once a second, what its process counts.

What trains and samples never waits for it: it has a socket of its own, and a report that the parent has no room for is
dropped. It computes for at most a hundredth of the time, so where a report is much work, fewer are made. If it fails,
the log says so, and the process goes on without reports.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from tinsmith.errors import reported
from tinsmith.protocol.gate import ChildKeys
from tinsmith.protocol.heartbeat import beside_socket
from tinsmith.protocol.link import heartbeat_address
from tinsmith.protocol.messages import Message

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Least time between two reports."""
PAUSE = 100
"""Least time between two reports, as a multiple of what one computes."""


class Reports:
    """The reports of this process, from `start` on until the process ends."""

    def __init__(self, address: str, make: Callable[[], Message | None], keys: ChildKeys | None = None) -> None:
        """Send what `make` returns, in this thread, to the parent that bound the link `address`; None is no report."""
        self._address = heartbeat_address(address)
        self._make = make
        self._keys = keys

    def start(self) -> None:
        threading.Thread(target=self._run, name="reports", daemon=True).start()

    def _run(self) -> None:
        with reported(Exception, _log_end):
            self._report_on()

    def _report_on(self) -> None:
        socket = beside_socket(self._address, self._keys)
        while True:
            began = time.thread_time()
            message = self._make()
            if message is not None:
                with suppress(zmq.Again):
                    socket.send_multipart(message.to_frames(), flags=zmq.NOBLOCK)
            time.sleep(pause_s(time.thread_time() - began))


def _log_end(error: Exception) -> None:
    log.error("this process reports nothing any more; its work goes on", exc_info=error)


def pause_s(computed_s: float) -> float:
    """Return the seconds until the next report, after one for which a thread computed so long.

    What it waited does not count: a driver, a full machine or SIGSTOP puts off no later report.
    """
    return max(EVERY_S, PAUSE * computed_s)
