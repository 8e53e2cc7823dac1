"""Processed images, shared by all threads that render: each image is decoded once, also if several threads want it at the same time."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from cachetools import LRUCache

from tinsmith.models.images import ImageInput

Key = tuple[bytes, str]
"""The SHA-256 of an image's bytes, and the format that they are labelled with."""


class ImageCache:
    """Processed images by key. When they take more than `max_bytes`, the least recently used ones go. Any thread may use it."""

    def __init__(self, max_bytes: int) -> None:
        self._held: LRUCache[Key, ImageInput] = LRUCache(max_bytes, getsizeof=lambda image: image.pixels.nbytes)
        self._making: dict[Key, Future[ImageInput]] = {}
        """Images that a thread is processing now."""
        self._lock = threading.Lock()
        """Held for look-ups only, never while an image is decoded."""

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key) -> ImageInput | None:
        """The image, if it is here."""
        with self._lock:
            return self._held.get(key)

    def get_or_make(self, key: Key, make: Callable[[], ImageInput]) -> ImageInput:
        """The image; if it is not here, what `make` returns. While one thread makes it, others that want it wait.

        Raises what `make` raises. A thread that waited for another's failed attempt makes its own, so that its error is its own too.
        """
        while True:
            with self._lock:
                image = self._held.get(key)
                if image is not None:
                    return image
                others = self._making.get(key)
                if others is None:
                    mine = self._making[key] = Future()
            if others is None:
                return self._make(key, make, mine)
            if others.exception() is None:
                return others.result()

    def clear(self) -> None:
        """Forget all images."""
        with self._lock:
            self._held.clear()

    def _make(self, key: Key, make: Callable[[], ImageInput], made: Future[ImageInput]) -> ImageInput:
        try:
            image = make()
        except BaseException as error:
            self._end(key, None)
            made.set_exception(error)
            raise
        self._end(key, image)
        made.set_result(image)
        return image

    def _end(self, key: Key, image: ImageInput | None) -> None:
        with self._lock:
            del self._making[key]
            if image is not None and image.pixels.nbytes <= self._held.maxsize:
                self._held[key] = image
