"""Processed pictures, shared by all threads that render: each picture is decoded once, also if several threads want it at the same time."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from cachetools import LRUCache

from tinsmith.models.pictures import PictureInput

Key = tuple[bytes, str]
"""The SHA-256 of a picture's bytes, and the format that they are labelled with."""


class PictureCache:
    """Processed pictures by key. When they take more than `max_bytes`, the least recently used ones go. Any thread may use it."""

    def __init__(self, max_bytes: int) -> None:
        self._held: LRUCache[Key, PictureInput] = LRUCache(max_bytes, getsizeof=lambda picture: picture.pixels.nbytes)
        self._making: dict[Key, Future[PictureInput]] = {}
        """Pictures that a thread is processing now."""
        self._lock = threading.Lock()
        """Held for look-ups only, never while a picture is decoded."""

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key) -> PictureInput | None:
        """The picture, if it is here."""
        with self._lock:
            return self._held.get(key)

    def get_or_make(self, key: Key, make: Callable[[], PictureInput]) -> PictureInput:
        """The picture; if it is not here, what `make` returns. While one thread makes it, others that want it wait.

        Raises what `make` raises. A thread that waited for another's failed attempt makes its own, so that its error is its own too.
        """
        while True:
            with self._lock:
                picture = self._held.get(key)
                if picture is not None:
                    return picture
                others = self._making.get(key)
                if others is None:
                    mine = self._making[key] = Future()
            if others is None:
                return self._make(key, make, mine)
            if others.exception() is None:
                return others.result()

    def clear(self) -> None:
        """Forget all pictures."""
        with self._lock:
            self._held.clear()

    def _make(self, key: Key, make: Callable[[], PictureInput], made: Future[PictureInput]) -> PictureInput:
        try:
            picture = make()
        except BaseException as error:
            self._end(key, None)
            made.set_exception(error)
            raise
        self._end(key, picture)
        made.set_result(picture)
        return picture

    def _end(self, key: Key, picture: PictureInput | None) -> None:
        with self._lock:
            del self._making[key]
            if picture is not None and picture.pixels.nbytes <= self._held.maxsize:
                self._held[key] = picture
