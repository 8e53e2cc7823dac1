"""Queues by session: sessions take turns, each in its own order, so that none waits behind everything that another sent."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """A queue for each session, served round robin. An item is told from others by identity."""

    def __init__(self) -> None:
        """Create an empty queue."""
        self._queues: dict[str, deque[Item]] = {}
        """Only sessions with items; the first is the next to be served."""

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[Item]:
        """All items in the order in which they would be served. They may be taken meanwhile."""
        queues = deque(iter(tuple(queue)) for queue in self._queues.values())
        while queues:
            queue = queues.popleft()
            for item in queue:
                queues.append(queue)
                yield item
                break

    @property
    def sessions(self) -> list[str]:
        """The sessions with items, next to be served first."""
        return list(self._queues)

    def first(self, session: str) -> Item:
        """The next item of that session. Raises KeyError if it has none."""
        return self._queues[session][0]

    def add(self, session: str, item: Item) -> None:
        """Let an item wait behind the others of its session."""
        self._queues.setdefault(session, deque()).append(item)

    def put_back(self, session: str, item: Item) -> None:
        """Let an item wait before the others of its session."""
        self._queues.setdefault(session, deque()).appendleft(item)

    def take(self, session: str, item: Item) -> None:
        """Remove an item that is served; it is the turn of the other sessions then. Raises KeyError or ValueError if it is not there."""
        queue = self._queues.pop(session)
        queue.remove(item)
        if queue:
            self._queues[session] = queue

    def drop(self, gone: Callable[[Item], bool]) -> list[Item]:
        """Remove the items that are `gone`, and return them."""
        dropped = [item for queue in self._queues.values() for item in queue if gone(item)]
        if dropped:
            kept = {session: deque(item for item in queue if not gone(item)) for session, queue in self._queues.items()}
            self._queues = {session: queue for session, queue in kept.items() if queue}
        return dropped

    def clear(self) -> None:
        """Remove all items."""
        self._queues.clear()
