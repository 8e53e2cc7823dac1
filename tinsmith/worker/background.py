"""Threads beside the device: they render, read and write while its own thread trains and samples."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """A pool of threads whose results come back to one thread, the device's."""

    def __init__(self, name: str, threads: int, wake: Callable[[], None]) -> None:
        """`wake` is called in a thread of the pool when there is something to `deliver`."""
        self._pool = ThreadPoolExecutor(threads, name)
        self._wake = wake
        self._ended: deque[tuple[Callable[[Any], None], Future[Any]]] = deque()
        self._closed = False
        self.running = 0
        """Jobs that were started and not delivered."""

    def run(self, work: Callable[[], T], then: "Callable[[Future[T]], None]") -> None:
        """Run `work` in the pool; `deliver` calls `then` with the future that holds its result or its error."""
        self.running += 1
        self._pool.submit(work).add_done_callback(partial(self._end, then))

    def _end(self, then: "Callable[[Future[T]], None]", future: "Future[T]") -> None:
        if not self._closed:  # else nobody is there to wake up
            self._ended.append((then, future))
            self._wake()

    @property
    def has_ended(self) -> bool:
        """Whether `deliver` would do something."""
        return bool(self._ended)

    def deliver(self) -> None:
        """Hand over what has ended."""
        while self._ended:
            then, future = self._ended.popleft()
            self.running -= 1
            then(future)

    def close(self) -> None:
        """Start nothing more, and do not wait for what runs."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
