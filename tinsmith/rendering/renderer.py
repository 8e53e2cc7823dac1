"""Renders the chunks of a ModelInput to a `RenderedInput`: the only place where text and images become token ids.

An image is decoded and processed once (`processor.py`), and remembered by the hash of its bytes. Placeholders are
expanded here; a placeholder id that arrives as a text token stays text.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from tinsmith.config import ImagesConfig
from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.families import ImageSpan, positions
from tinsmith.models.vision_tower import ImageInput
from tinsmith.rendering.processor import LocalProcessor
from tinsmith.rendering.rendered import RenderedInput, image_mark
from tinsmith.wire.chunks import Chunk, ImageChunk, TextChunk
from tinsmith.wire.forward_backward import IMAGE_FORMATS
from tinsmith.wire.images import check_pixels, decode, read_header


@dataclass(frozen=True)
class Measured:
    """A ModelInput that is checked, and whose length is known, before its images are decoded."""

    chunks: tuple[Chunk, ...]
    lengths: tuple[int, ...]
    """Tokens of each chunk."""
    pixels: Mapping[bytes, int]
    """Pixels of each image that is still to be decoded, by SHA-256."""

    def __len__(self) -> int:
        return sum(self.lengths)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[n] the token ids; -1 at the positions of images."""
        parts = [
            chunk.tokens if isinstance(chunk, TextChunk) else np.full(length, -1)
            for chunk, length in zip(self.chunks, self.lengths, strict=True)
        ]
        return np.concatenate(parts).astype(np.int64, copy=False)

    @property
    def identity(self) -> NDArray[np.int64]:
        """[n] what `RenderedInput.identity` will be."""
        parts = [
            chunk.tokens if isinstance(chunk, TextChunk) else np.full(length, image_mark(chunk.sha256))
            for chunk, length in zip(self.chunks, self.lengths, strict=True)
        ]
        return np.concatenate(parts).astype(np.int64, copy=False)


@dataclass(frozen=True)
class _NewImage:
    """An image that is still to be decoded."""

    chunk: ImageChunk
    tokens: int
    pixels: int


Key = tuple[bytes, str]
"""SHA-256 of an image's bytes, and the format that they are labelled with."""


class ImageCache:
    """Processed images by key, for any thread; over `max_bytes` the least recently used ones go."""

    def __init__(self, max_bytes: int) -> None:
        self._held: LRUCache[Key, ImageInput] = LRUCache(max_bytes, getsizeof=lambda image: image.pixels.nbytes)
        self._making: dict[Key, Future[ImageInput | None]] = {}
        """Images that a thread is processing now; None will come of those that fail."""
        self._lock = threading.Lock()
        """Held for look-ups only, never while an image is decoded."""

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key) -> ImageInput | None:
        with self._lock:
            return self._held.get(key)

    def get_or_make(self, key: Key, make: Callable[[], ImageInput]) -> ImageInput:
        """Return the image, or what `make` returns or raises if it is not here; other threads that want it wait.

        A thread that waited for another's failed attempt makes its own, so that its error is its own too.
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
            if (made := others.result()) is not None:
                return made

    def _make(self, key: Key, make: Callable[[], ImageInput], made: Future[ImageInput | None]) -> ImageInput:
        image = None
        try:
            image = make()
            return image
        finally:
            with self._lock:
                del self._making[key]
                if image is not None and image.pixels.nbytes <= self._held.maxsize:
                    self._held[key] = image
            made.set_result(image)


class Renderer:
    """Renders for one base model, for several threads at once."""

    def __init__(self, base: BaseModel, limits: ImagesConfig, read_blob: Callable[[bytes], bytes]) -> None:
        """Load the model's own image processor. `read_blob` fetches image bytes from the store by SHA-256."""
        self.base = base
        self.limits = limits
        self.read_blob = read_blob
        self.processor = LocalProcessor(base.tokenizer_id) if base.family.takes_images else None
        self.placeholder = int(base.config.image_token_id) if base.family.takes_images else -1
        self.cache = ImageCache(limits.image_cache_mib * 2**19)

    @property
    def image_facts(self) -> dict[str, int]:
        """Fields of `ModelFacts` by which the server counts the tokens of images; empty for a model of text alone."""
        if self.processor is None:
            return {}
        return dict(zip(("token_edge", "least_pixels", "most_pixels"), self.processor.sizes, strict=True))

    def render(self, chunks: Sequence[Chunk]) -> RenderedInput:
        """Render the sequence that `chunks` describe. Raises UserError as `measure` and `render_measured` do."""
        return self.render_measured(self.measure(chunks))

    def measure(self, chunks: Sequence[Chunk]) -> Measured:
        """Check `chunks` as far as that is cheap: of an image only its header is read.

        Raises UserError: nothing in it, a token outside the vocabulary, an image that is too large or not wanted by
        this model, a count that differs from `expected_tokens`, a sequence longer than the context, or too many pixels.
        """
        self._check_tokens(chunks)
        measured, lengths, new = [], [], dict[Key, _NewImage]()
        for index, chunk in enumerate(chunks):
            count = len(chunk.tokens) if isinstance(chunk, TextChunk) else 0
            if isinstance(chunk, ImageChunk):
                chunk, count = self._measure_image(index, chunk, new)
            measured.append(chunk)
            lengths.append(count)
        self._check_length(sum(lengths))
        pixels = {image.chunk.sha256: image.pixels for image in new.values()}
        check_pixels(sum(pixels.values()), self.limits)
        return Measured(tuple(measured), tuple(lengths), pixels)

    def undecoded(self, measured: Measured) -> dict[bytes, int]:
        """Pixels of each of its images that was not decoded meanwhile, by SHA-256."""
        return {
            sha256: size
            for sha256, size in measured.pixels.items()
            if not any(self.cache.get((sha256, f)) for f in IMAGE_FORMATS)
        }

    def render_measured(self, measured: Measured) -> RenderedInput:
        """Render the sequence, decoding its images. Raises UserError for one that is broken."""
        parts, spans, images, length = [], [], [], 0
        for index, (chunk, count) in enumerate(zip(measured.chunks, measured.lengths, strict=True)):
            if isinstance(chunk, TextChunk):
                parts.append(chunk.tokens)
            else:
                image = self._image(index, chunk, count)
                parts.append(np.full(count, self.placeholder, dtype=np.int32))
                spans.append(ImageSpan(length, count, image.grid_thw))
                images.append(image)
            length += count
        where = positions(self.base.family, length, tuple(spans), self.base.merge_size)
        return RenderedInput(np.concatenate(parts), tuple(spans), tuple(images), where)

    def _check_tokens(self, chunks: Sequence[Chunk]) -> None:
        """Check all texts at once, as there may be one for every token; a wrong one is looked for if there is any."""
        texts = [(index, chunk.tokens) for index, chunk in enumerate(chunks) if isinstance(chunk, TextChunk)]
        if not texts:
            return
        tokens = np.concatenate([tokens for _, tokens in texts])
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= self.base.vocab_size):
            for index, of_chunk in texts:
                check_token_ids(of_chunk, self.base.vocab_size, f"chunk {index}: token")

    def _check_length(self, length: int) -> None:
        if length == 0:
            raise UserError("the model input holds no token; send at least one")
        if length > self.base.max_context:
            raise UserError(
                f"the model input holds {length} tokens, the context window of {self.base.name} is "
                f"{self.base.max_context}"
            )

    def _measure_image(self, index: int, chunk: ImageChunk, new: dict[Key, _NewImage]) -> tuple[ImageChunk, int]:
        """Return the image and its tokens; one still to be decoded comes with its bytes, and is noted in `new`."""
        # The same bytes under a wrong label are refused, whether they are known or not
        key = chunk.sha256, chunk.format
        known = self.cache.get(key)
        if known is not None:
            count: int = known.rows.stop
        else:
            if key not in new:
                new[key] = self._read_new(index, chunk)
            count = new[key].tokens
        if chunk.expected_tokens is not None and chunk.expected_tokens != count:
            raise UserError(
                f"chunk {index}: expected_tokens is {chunk.expected_tokens}, but the image takes {count} tokens in "
                f"{self.base.name}; count with the processor configuration of the served model"
            )
        return new[key].chunk if key in new else chunk, count

    def _read_new(self, index: int, chunk: ImageChunk) -> _NewImage:
        if self.processor is None:
            raise UserError(f"chunk {index} is an image, but {self.base.name} takes text only")
        data = self._bytes_of(chunk)
        with _naming(index):
            header = read_header(data, chunk.format, self.limits)
            return _NewImage(replace(chunk, data=data), self.processor.tokens(header), header.width * header.height)

    def _image(self, index: int, chunk: ImageChunk, count: int) -> ImageInput:
        image = self.cache.get_or_make((chunk.sha256, chunk.format), lambda: self._process(index, chunk))
        if image.rows.stop != count:
            raise TinsmithError(
                f"chunk {index}: the image was processed to {image.rows.stop} tokens and its header promised {count}"
            )
        return image

    def _process(self, index: int, chunk: ImageChunk) -> ImageInput:
        assert self.processor is not None, "measure takes no images without it"
        with _naming(index):
            image = decode(self._bytes_of(chunk), chunk.format, self.limits)
        return self.processor(chunk.sha256, image)

    def _bytes_of(self, chunk: ImageChunk) -> bytes:
        return chunk.data if chunk.data is not None else self.read_blob(chunk.sha256)


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Let an error of the body name the chunk."""
    try:
        yield
    except UserError as error:
        raise UserError(f"chunk {index}: {error}") from error


def check_token_ids(ids: "np.ndarray[Any, Any]", vocab_size: int, what: str) -> None:
    """Raise UserError naming position and value if an id is not in [0, vocab_size)."""
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        where = position_of(wrong[0], ids.shape)
        raise UserError(
            f"{what} at position {where} is {ids.flat[wrong[0]]}, which is not in the vocabulary of {vocab_size}"
        )


def position_of(index: int, shape: tuple[int, ...]) -> int | tuple[int, ...]:
    """Place of a flat index in an array of that shape, for people: a number, or one for each dimension."""
    place = tuple(int(i) for i in np.unravel_index(index, shape))
    return place[0] if len(place) == 1 else place
