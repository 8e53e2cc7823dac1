"""Threads beside the device, which render, read and write while the device's thread trains and samples."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from tinsmith.sampling.turns import Turns

T = TypeVar("T")

SMALL_BYTES = 64 * 1024
"""Requests of up to this size, without new images, are read at once: a thread would take longer."""


class Background:
    """A pool of threads whose results come back to the device's thread. Sessions take turns in it."""

    def __init__(self, name: str, threads: int, wake: Callable[[], None]) -> None:
        """`wake` is called in a thread of the pool when there is something to `deliver`."""
        self._pool = ThreadPoolExecutor(threads, name)
        self._wake = wake
        self._waiting: Turns[tuple[Callable[[], Any], Callable[[Any], None]]] = Turns()
        """Jobs that no thread has begun, and what their results are given to."""
        self._threads = threads
        self._begun = 0
        """Jobs that threads are at."""
        self._lock = threading.Lock()
        """Held to choose the next job, to wake, and to close."""
        self._ended: deque[tuple[Callable[[Any], None], Future[Any]]] = deque()
        self._closed = False
        self.running = 0
        """Jobs that were started and not delivered."""

    def run(self, work: Callable[[], T], then: "Callable[[Future[T]], None]", session: str = "") -> None:
        """Run `work` in the pool; `deliver` calls `then` with its future.

        When a thread is free, the session is served that was served longest ago.
        """
        self.running += 1
        with self._lock:
            self._waiting.add(session, (work, then))
        self._begin_next()

    def _begin_next(self) -> None:
        with self._lock:
            if self._closed or not self._waiting or self._begun == self._threads:
                return
            session = self._waiting.sessions[0]
            job = work, then = self._waiting.first(session)
            self._waiting.take(session, job)
            self._begun += 1
            begun = self._pool.submit(work)
        begun.add_done_callback(partial(self._end, then))

    def _end(self, then: "Callable[[Future[T]], None]", future: "Future[T]") -> None:
        with self._lock:
            self._begun -= 1
        self._begin_next()
        with self._lock:  # who closes waits until nobody is being woken
            if not self._closed:
                self._ended.append((then, future))
                self._wake()

    @property
    def has_ended(self) -> bool:
        """Whether `deliver` would do something."""
        return bool(self._ended)

    def deliver(self) -> None:
        while self._ended:
            then, future = self._ended.popleft()
            self.running -= 1
            then(future)

    def close(self) -> None:
        """Start nothing more, and do not wait for what runs. Nothing is woken afterwards."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
