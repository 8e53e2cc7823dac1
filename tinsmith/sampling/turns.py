"""Queues by session, served in turn, so that nobody waits behind everything that another sent."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """A queue for each session, served round robin. Items are told apart by identity."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Item]] = {}
        """Only sessions with items; the first is served next."""

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[Item]:
        """Yield all items in the order in which they would be served. They may be taken meanwhile."""
        queues = deque(iter(tuple(queue)) for queue in self._queues.values())
        while queues:
            queue = queues.popleft()
            for item in queue:
                queues.append(queue)
                yield item
                break

    @property
    def sessions(self) -> list[str]:
        return list(self._queues)

    def first(self, session: str) -> Item:
        return self._queues[session][0]

    def add(self, session: str, item: Item) -> None:
        self._queues.setdefault(session, deque()).append(item)

    def put_back(self, session: str, item: Item) -> None:
        """Let an item wait before the others of its session."""
        self._queues.setdefault(session, deque()).appendleft(item)

    def take(self, session: str, item: Item) -> None:
        """Remove an item that is served, and let the other sessions have their turn.

        Raises KeyError or ValueError if it is not there.
        """
        queue = self._queues.pop(session)
        queue.remove(item)
        if queue:
            self._queues[session] = queue

    def drop(self, gone: Callable[[Item], bool]) -> list[Item]:
        """Remove and return the items that are `gone`."""
        dropped = [item for queue in self._queues.values() for item in queue if gone(item)]
        if dropped:
            kept = {session: deque(item for item in queue if not gone(item)) for session, queue in self._queues.items()}
            self._queues = {session: queue for session, queue in kept.items() if queue}
        return dropped

    def clear(self) -> None:
        self._queues.clear()
